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

// Below the rank of every expert that can still be chosen.
constexpr u64 NONE = 0;

// Orders experts: larger logits first, then lower numbers. A NaN of either sign ranks as infinity.
DEV u64 rank(f32 logit, u32 expert) {
    u32 b = as_u32(logit == 0.0f ? 0.0f : logit);
    if ((b & 0x7fffffffu) > 0x7f800000u) b = 0x7f800000u;
    u32 size = b & 0x80000000u ? ~b : b | 0x80000000u;
    return (u64)size << 32 | ~expert;
}
DEV u32 expert_of(u64 rank) { return ~(u32)rank; }
// The logit; infinity for a NaN.
DEV f32 logit_of(u64 rank) {
    const u32 size = rank >> 32;
    return as_f32(size & 0x80000000u ? size & 0x7fffffffu : ~size);
}

// A team's row: its place, and whether to write it.
struct Row {
    u64 first_logit, first_place;
    bool writes, padding, looks;
};

// EACH: the most experts that a lane ranks.
template <u32 EACH>
DEV void choose(const Row& row, const f32* logits, const u64* table, u32* experts, f32* weights, u32* absent, f32 scale, u32 count,
                u32 used, bool normalise) {
    f32 logit[EACH];
    u64 left[EACH], best = NONE;
    UNROLL for (u32 i = 0; i < EACH; i++) {
        const u32 expert = i * TEAM + team_lane();
        logit[i] = expert < count ? logits[row.first_logit + expert] : 0.0f;
        left[i] = expert < count ? rank(logit[i], expert) : NONE;
        best = Max::of(best, left[i]);
    }
    best = team_max(best);
    const f32 most = logit_of(best);
    f32 total = 0.0f;
    if (!normalise) {
        UNROLL for (u32 i = 0; i < EACH; i++) {
            if (i * TEAM + team_lane() < count) total += exp_f32(logit[i] - most);
        }
        total = team_sum(total);
    }
    // Lane l keeps the choices of places l, l + 32, ... A look at the table for each would be waited for each time.
    f32 sum = 0.0f;
    u64 taken = best, chosen[EACH];
    UNROLL for (u32 i = 0; i < EACH; i++) {
        chosen[i] = best;
        for (u32 place = i * TEAM; place < used && place < (i + 1) * TEAM; place++) {
            if (place > 0) {
                u64 next = NONE;
                UNROLL for (u32 e = 0; e < EACH; e++) next = left[e] < taken ? Max::of(next, left[e]) : next;
                taken = team_max(next);
            }
            sum += exp_f32(logit_of(taken) - most);
            if (place % TEAM == team_lane()) chosen[i] = taken;
        }
    }
    if (normalise) total = sum;
    UNROLL for (u32 i = 0; i < EACH; i++) {
        const u32 place = i * TEAM + team_lane(), expert = expert_of(chosen[i]);
        if (place >= used || !row.writes) continue;
        const f32 share = exp_f32(logit_of(chosen[i]) - most) / total * scale;
        experts[row.first_place + place] = row.padding ? NO_EXPERT : expert;
        weights[row.first_place + place] = row.padding ? 0.0f : share;
        if (row.looks && table[expert] == 0) absent[0] = 1;
    }
}

} // namespace routing

KERNEL(256, route, const f32* logits, const u32* row_seq, const u64* table, u32* experts, f32* weights, u32* absent, f32 scale,
       u32 rows, u32 count, u32 used, u32 normalise) {
    using namespace routing;
    wait_for_predecessor();
    const u32 wanted = block_x() * (block_threads() / TEAM) + team_id();
    // A team without a row repeats the last and writes nothing: all lanes of a wave reduce together.
    const u32 at = min_u32(wanted, rows - 1);
    const bool padding = row_seq[at] == NO_SEQUENCE, looks = table != nullptr && absent != nullptr && !padding;
    const Row row = {(u64)at * count, (u64)at * used, wanted < rows, padding, looks};
    // Fewer experts take fewer registers and comparisons.
    if (count <= 128) choose<4>(row, logits, table, experts, weights, absent, scale, count, used, normalise != 0);
    else choose<16>(row, logits, table, experts, weights, absent, scale, count, used, normalise != 0);
}
