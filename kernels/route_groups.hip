// route_groups: experts[m] = the `used` largest of chances[m] + bias among the best groups, weights[m] = these chances / sum * scale
//
// For models whose experts lie in groups. A group is as good as the sum of the two largest chances + bias in it.
// Shapes     groups: runs of count / groups neighbouring experts; of them the groups_used best count, of equal ones those with
//            lower numbers. An expert of another group counts as minus infinity
//            logits, bias, row_seq, table, experts, weights, absent, scale, normalise, sigmoid: as of route. Chances rank experts
//            with a null bias too. A NaN counts as the largest, in its group's sum too
// Requires   count a multiple of groups, at least 2 of them in each; 1 <= groups_used <= groups; 1 <= used <= groups_used *
//            count / groups; count <= 512
// Launch     grid = M, block = 256
// Alignment  4 bytes
// Sums in    as route; a group's sum is one f32 addition
// Tolerance  experts: 0 where chances and groups' sums differ by 1e-5; weights: |got / want - 1| < 4e-6
// Reference  sorts and f64 exponentials in tests/kernels/groups.rs
// Moves      4 * count bytes in, 8 * used out per row; bound by latency
#include "prelude/prelude.h"
#include "common/routing.h"

KERNEL(256, route_groups, const f32* logits, const f32* bias, const u32* row_seq, const u64* table, u32* experts, f32* weights,
       u32* absent, f32 scale, u32 rows, u32 count, u32 used, u32 normalise, u32 sigmoid, u32 groups, u32 groups_used) {
    wait_for_predecessor();
    if (block_x() >= rows) return;
    routing::choose<true>({logits, bias, row_seq, table, experts, weights, absent, scale, count, used, normalise, sigmoid, groups,
                           groups_used}, block_x());
}
