// route: experts[m] = the `used` largest of chances[m] + bias, weights[m] = these chances / sum * scale
//
// A chance is e^logit / sum of e^logit over all experts; where `sigmoid` is not 0, it is 1 / (1 + e^-logit).
// Shapes     logits: f32[M][count]; bias: f32[count], or null: then the largest logits are chosen
//            experts: u32[M][used] and weights: f32[M][used], best first; of equal experts the one with the lower number.
//            Where `normalise` is not 0, the sum is over the chosen experts, for sigmoids at least 2^-14; else it is 1.
//            A NaN counts as the largest; all weights of its row are NaN, or only its own where sigmoids have no sum. With a
//            bias and no `sigmoid`, all chances of its row are NaN, and the experts with the lowest numbers are chosen
//            row_seq: u32[M]; NO_SEQUENCE (common/pages.h): the row's experts are NO_EXPERT, its weights 0
//            table: u64[count], addresses of experts, 0 for those that are not there; absent: u32[1], 1 if a row chose one of
//            these, else as before. Either is null: no look at the table
// Requires   1 <= used <= count <= 512
// Launch     grid = M, block = 256
// Alignment  4 bytes
// Sums in    f32: each thread's terms in rising order, 32 lanes as a tree, then these as a tree; a row's bits depend on its
//            logits alone
// Tolerance  experts: 0, with a bias where chances differ by 1e-5; weights: |got / want - 1| < 4e-6
// Reference  a sort and f64 exponentials in tests/kernels/experts.rs
// Moves      4 * count bytes in, 8 * used out per row; bound by latency. An expert's place is the number of experts before it.
//            Threads count it beside each other; maxima one after another would be waited for each time
#include "prelude/prelude.h"
#include "common/routing.h"

KERNEL(256, route, const f32* logits, const f32* bias, const u32* row_seq, const u64* table, u32* experts, f32* weights,
       u32* absent, f32 scale, u32 rows, u32 count, u32 used, u32 normalise, u32 sigmoid) {
    wait_for_predecessor();
    if (block_x() >= rows) return;
    routing::choose<false>({logits, bias, row_seq, table, experts, weights, absent, scale, count, used, normalise, sigmoid}, block_x());
}
