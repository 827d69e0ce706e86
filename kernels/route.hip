// route: experts[m] = the `used` largest of logits[m], weights[m] = softmax of these * scale
//
// Shapes     logits: f32[M][count]; experts: u32[M][used] and weights: f32[M][used], best first; of equal logits the expert
//            with the lower number. weight = e^logit / sum of e^logit * scale; the sum is over the chosen experts where
//            `normalise` is not 0, else over all
//            A NaN counts as the largest logit; all weights of its row are NaN
//            row_seq: u32[M]; NO_SEQUENCE (common/pages.h): the row's experts are NO_EXPERT, its weights 0
//            table: u64[count], addresses of experts, 0 for those that are not there; absent: u32[1], 1 if a row chose one of
//            these, else as before. Either is null: no look at the table
// Requires   1 <= used <= count <= 512
// Launch     grid = ceil(M / 8), block = 256: 32 lanes a row
// Alignment  4 bytes
// Sums in    f32, fixed order; a row's bits depend on its logits alone
// Tolerance  experts: 0; weights: |got / want - 1| < 4e-6
// Reference  a sort and f64 exponentials in tests/kernels/experts.rs
// Moves      4 * count bytes in, 8 * used out per row; bound by latency
#include "prelude/prelude.h"
#include "common/experts.h"
#include "common/pages.h"
#include "common/reduce.h"

namespace routing {

// Most experts that a lane ranks: 512 over 32 lanes.
constexpr u32 EACH = 16;
// Below the rank of every expert that can still be chosen.
constexpr u64 NONE = 0;

// Orders experts: larger logits first, then lower numbers. A NaN of either sign ranks as infinity.
DEV u64 rank(f32 logit, u32 expert) {
    u32 b = as_u32(logit == 0.0f ? 0.0f : logit);
    if ((b & 0x7fffffffu) > 0x7f800000u) b = 0x7f800000u;
    u32 size = b & 0x80000000u ? ~b : b | 0x80000000u;
    return (u64)size << 32 | ~expert;
}

} // namespace routing

KERNEL(256, route, const f32* logits, const u32* row_seq, const u64* table, u32* experts, f32* weights, u32* absent, f32 scale,
       u32 rows, u32 count, u32 used, u32 normalise) {
    using namespace routing;
    wait_for_predecessor();
    u32 wanted = block_x() * (block_threads() / TEAM) + team_id();
    // A team without a row repeats the last and writes nothing: all lanes of a wave reduce together.
    u32 row = min_u32(wanted, rows - 1);
    const bool padding = row_seq[row] == NO_SEQUENCE, looks = table != nullptr && absent != nullptr && !padding;
    f32 logit[EACH];
    u64 left[EACH];
    u64 best = NONE;
    UNROLL for (u32 i = 0; i < EACH; i++) {
        u32 expert = i * TEAM + team_lane();
        logit[i] = expert < count ? logits[(u64)row * count + expert] : 0.0f;
        left[i] = expert < count ? rank(logit[i], expert) : NONE;
        best = Max::of(best, left[i]);
    }
    f32 most = logits[(u64)row * count + ~(u32)team_max(best)], total = 0.0f;
    if (normalise == 0) {
        UNROLL for (u32 i = 0; i < EACH; i++) {
            if (i * TEAM + team_lane() < count) total += exp_f32(logit[i] - most);
        }
        total = team_sum(total);
    }
    // Pass 0 sums the shares of the chosen experts, where they are normalised; pass 1 writes experts and weights.
    for (u32 pass = 0; pass < 2; pass++) {
        if (pass == 0 && normalise == 0) continue;
        f32 sum = 0.0f;
        u64 taken = ~0ull;
        for (u32 place = 0; place < used; place++) {
            u64 next = NONE;
            UNROLL for (u32 i = 0; i < EACH; i++) next = left[i] < taken ? Max::of(next, left[i]) : next;
            taken = team_max(next);
            u32 expert = ~(u32)taken;
            f32 share = exp_f32(logits[(u64)row * count + expert] - most);
            sum += share;
            if (pass == 1 && team_lane() == 0 && wanted < rows) {
                experts[(u64)row * used + place] = padding ? NO_EXPERT : expert;
                weights[(u64)row * used + place] = padding ? 0.0f : share / total * scale;
                if (looks && table[expert] == 0) absent[0] = 1;
            }
        }
        if (pass == 0) total = sum;
    }
}
