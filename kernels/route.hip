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
#include "common/experts.h"
#include "common/pages.h"
#include "common/reduce.h"

namespace routing {

constexpr u32 EXPERTS = 512, THREADS = 256;
constexpr f32 SUM_MIN = 6.103515625e-5f;

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

KERNEL(256, route, const f32* logits, const f32* bias, const u32* row_seq, const u64* table, u32* experts, f32* weights,
       u32* absent, f32 scale, u32 rows, u32 count, u32 used, u32 normalise, u32 sigmoid) {
    using namespace routing;
    LDS(ranks, u32[EXPERTS]);
    LDS(places, u32[EXPERTS]);
    LDS(chosen, u32[EXPERTS]);
    LDS(room, f32[TEAMS_MAX]);
    LDS(ranks_room, u32[TEAMS_MAX]);
    wait_for_predecessor();
    const u32 row = block_x(), i = thread_id();
    if (row >= rows) return;
    const bool padding = row_seq[row] == NO_SEQUENCE;
    const f32* mine = logits + u64(row) * count;
    const bool sums = bias != nullptr && sigmoid == 0;
    f32 most = 0.0f, all = 1.0f;
    if (sums) {
        u32 top = 0;
        for (u32 e = i; e < count; e += THREADS) top = max_u32(top, rank(mine[e]));
        most = logit_of(teams_max(top, ranks_room));
        f32 sum = 0.0f;
        for (u32 e = i; e < count; e += THREADS) sum += exp_f32(mine[e] - most);
        all = teams_sum(sum, room);
    }
    for (u32 e = i; e < count; e += THREADS) {
        f32 size = mine[e];
        if (bias != nullptr) size = (sigmoid != 0 ? sigmoid_f32(size) : exp_f32(size - most) / all) + bias[e];
        ranks[e] = rank(size);
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
    if (bias == nullptr) most = logit_of(ranks[chosen[0]]);
    // Ranks are nearer than logits. Infinity, which stands for a NaN there, gives NaN as a difference, but not as a sigmoid.
    auto share = [&](u32 e) {
        const f32 logit = bias == nullptr && sigmoid == 0 ? logit_of(ranks[e]) : mine[e];
        return sigmoid != 0 ? sigmoid_f32(logit) : exp_f32(logit - most);
    };
    const u32 terms = normalise != 0 ? used : sigmoid != 0 ? 0 : count;
    f32 sum = 0.0f;
    for (u32 e = i; e < terms; e += THREADS) sum += share(normalise != 0 ? chosen[e] : e);
    f32 total = teams_sum(sum, room);
    if (sigmoid != 0) total = normalise == 0 ? 1.0f : total < SUM_MIN ? SUM_MIN : total;
    for (u32 place = i; place < used; place += THREADS) {
        const u32 expert = chosen[place];
        const f32 weight = share(expert) / total * scale;
        experts[u64(row) * used + place] = padding ? NO_EXPERT : expert;
        weights[u64(row) * used + place] = padding ? 0.0f : weight;
        if (table != nullptr && absent != nullptr && !padding && table[expert] == 0) absent[0] = 1;
    }
}
