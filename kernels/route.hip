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
// Launch     grid = M, block = 256
// Alignment  4 bytes
// Sums in    f32: each thread's terms in rising order, 32 lanes as a tree, then these as a tree; a row's bits depend on its
//            logits alone
// Tolerance  experts: 0; weights: |got / want - 1| < 4e-6
// Reference  a sort and f64 exponentials in tests/kernels/experts.rs
// Moves      4 * count bytes in, 8 * used out per row; bound by latency. An expert's place is the number of experts before it.
//            Threads count it beside each other; maxima one after another would be waited for each time
#include "prelude/prelude.h"
#include "common/experts.h"
#include "common/pages.h"
#include "common/reduce.h"

namespace routing {

constexpr u32 EXPERTS = 512, THREADS = 256;

// Orders logits as numbers do. A NaN of either sign ranks as infinity, and -0 as 0.
DEV u32 rank(f32 logit) {
    u32 b = as_u32(logit == 0.0f ? 0.0f : logit);
    if ((b & 0x7fffffffu) > 0x7f800000u) b = 0x7f800000u;
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}
// The logit; infinity for a NaN.
DEV f32 logit_of(u32 rank) { return as_f32(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank); }

// The number of experts `part`, `part` + `parts`, ... that come before an expert.
DEV u32 before(const u32* ranks, u32 count, u32 expert, u32 part, u32 parts) {
    const u32 mine = ranks[expert];
    u32 sum = 0;
    for (u32 e = part; e < count; e += parts) sum += ranks[e] > mine || (ranks[e] == mine && e < expert) ? 1 : 0;
    return sum;
}

} // namespace routing

KERNEL(256, route, const f32* logits, const u32* row_seq, const u64* table, u32* experts, f32* weights, u32* absent, f32 scale,
       u32 rows, u32 count, u32 used, u32 normalise) {
    using namespace routing;
    LDS(ranks, u32[EXPERTS]);
    LDS(places, u32[EXPERTS]);
    LDS(chosen, u32[EXPERTS]);
    LDS(room, f32[TEAMS_MAX]);
    wait_for_predecessor();
    const u32 row = block_x(), i = thread_id();
    if (row >= rows) return;
    const bool padding = row_seq[row] == NO_SEQUENCE;
    for (u32 e = i; e < count; e += THREADS) {
        ranks[e] = rank(logits[u64(row) * count + e]);
        places[e] = 0;
    }
    barrier_lds();
    // With few experts, several threads count for each: neighbours for different ones, so that they read the same rank.
    const u32 parts = max_u32(THREADS / count, 1);
    for (u32 e = i; e < count * parts; e += THREADS) atomic_add(&places[e % count], before(ranks, count, e % count, e / count, parts));
    barrier_lds();
    for (u32 e = i; e < count; e += THREADS) {
        if (places[e] < used) chosen[places[e]] = e;
    }
    barrier_lds();
    const f32 most = logit_of(ranks[chosen[0]]);
    f32 sum = 0.0f;
    for (u32 e = i; e < (normalise != 0 ? used : count); e += THREADS) {
        sum += exp_f32(logit_of(ranks[normalise != 0 ? chosen[e] : e]) - most);
    }
    const f32 total = teams_sum(sum, room);
    for (u32 place = i; place < used; place += THREADS) {
        const u32 expert = chosen[place];
        const f32 share = exp_f32(logit_of(ranks[expert]) - most) / total * scale;
        experts[u64(row) * used + place] = padding ? NO_EXPERT : expert;
        weights[u64(row) * used + place] = padding ? 0.0f : share;
        if (table != nullptr && absent != nullptr && !padding && table[expert] == 0) absent[0] = 1;
    }
}
