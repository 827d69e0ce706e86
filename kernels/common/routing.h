// The choice of a row's experts by their logits, for route.hip, router.hip and route_groups.hip. The first has the contract.
#pragma once
#include "experts.h"
#include "pages.h"
#include "reduce.h"

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

// The number of experts that come before an expert, of fours `part`, `part` + `parts`, ... of `count` ranks. Ranks lie at a multiple
// of 16 bytes. Those up to a multiple of 4 are 0, below any number's. Four ranks are one read of LDS, and some reads are in flight.
DEV u32 before(const u32* ranks, u32 count, u32 expert, u32 part, u32 parts) {
    constexpr u32 FLIGHT = 8;
    const u32 mine = ranks[expert], own = expert / 4, fours = ceil_div(count, 4);
    u32 sum = 0;
    ROLLED for (u32 start = part; start < fours; start += FLIGHT * parts) {
        u32x4 some[FLIGHT];
        UNROLL for (u32 i = 0; i < FLIGHT; i++) some[i] = load16(ranks + 4 * min_u32(start + i * parts, fours - 1));
        UNROLL for (u32 i = 0; i < FLIGHT; i++) {
            const u32 four = start + i * parts;
            // Equal ranks come before where their number is lower.
            const u32 most = four >= fours ? 0xffffffffu : four < own ? mine - 1 : mine;
            sum += (some[i].x > most) + (some[i].y > most) + (some[i].z > most) + (some[i].w > most);
        }
    }
    if (own % parts != part) return sum;
    for (u32 e = 4 * own; e < expert; e++) sum += ranks[e] == mine;
    return sum;
}

// Arguments of the choice, as route.hip has them.
struct Task {
    const f32* logits;
    const f32* bias;
    const u32* row_seq;
    const u64* table;
    u32* experts;
    f32* weights;
    u32* absent;
    f32 scale;
    u32 count, used, normalise, sigmoid;
    // Runs of neighbouring experts, and how many of them experts are chosen from: see route_groups.hip.
    u32 groups = 0, groups_used = 0;
};

// Below any number's rank but that of minus infinity, which it is.
constexpr u32 RANK_MIN = 0x007fffffu;

// Makes the ranks of experts of all but the best groups RANK_MIN. A group is as good as the sum of its two largest sizes.
// The whole block calls, after a barrier.
DEV void keep_best_groups(u32* ranks, const Task& t) {
    LDS(totals, u32[EXPERTS / 2]);
    const u32 each = t.count / t.groups, g = thread_id();
    if (g < t.groups) {
        u32 first = RANK_MIN, second = RANK_MIN;
        for (u32 e = g * each; e < (g + 1) * each; e++) {
            second = max_u32(second, min_u32(first, ranks[e]));
            first = max_u32(first, ranks[e]);
        }
        totals[g] = rank(logit_of(first) + logit_of(second));
    } else if (g < ceil_div(t.groups, 4) * 4) {
        totals[g] = 0;
    }
    barrier_lds();
    if (g < t.groups && before(totals, t.groups, g, 0, 1) >= t.groups_used) {
        for (u32 e = g * each; e < (g + 1) * each; e++) ranks[e] = RANK_MIN;
    }
    barrier_lds();
}

// The whole block of THREADS calls. GROUPED: experts are chosen of the best groups alone.
template <bool GROUPED> DEV void choose(const Task& t, u32 row) {
    LDS(ranks, u32[EXPERTS]);
    LDS(places, u32[EXPERTS]);
    LDS(chosen, u32[EXPERTS]);
    LDS(room, f32[TEAMS_MAX]);
    LDS(ranks_room, u32[TEAMS_MAX]);
    const u32 i = thread_id();
    const bool padding = t.row_seq[row] == NO_SEQUENCE;
    const f32* mine = t.logits + u64(row) * t.count;
    const bool sums = (GROUPED || t.bias != nullptr) && t.sigmoid == 0;
    f32 most = 0.0f, all = 1.0f;
    if (sums) {
        u32 top = 0;
        for (u32 e = i; e < t.count; e += THREADS) top = max_u32(top, rank(mine[e]));
        most = logit_of(teams_max(top, ranks_room));
        f32 sum = 0.0f;
        for (u32 e = i; e < t.count; e += THREADS) sum += exp_f32(mine[e] - most);
        all = teams_sum(sum, room);
    }
    for (u32 e = i; e < t.count; e += THREADS) {
        f32 size = mine[e];
        if constexpr (GROUPED) {
            size = t.sigmoid != 0 ? sigmoid_f32(size) : exp_f32(size - most) / all;
            if (t.bias != nullptr) size += t.bias[e];
        } else if (t.bias != nullptr) {
            size = (t.sigmoid != 0 ? sigmoid_f32(size) : exp_f32(size - most) / all) + t.bias[e];
        }
        ranks[e] = rank(size);
        places[e] = 0;
    }
    if (i < ceil_div(t.count, 4) * 4 - t.count) ranks[t.count + i] = 0;
    barrier_lds();
    if constexpr (GROUPED) keep_best_groups(ranks, t);
    // With few experts, several threads count for each: neighbours for different ones, so that they read the same rank.
    const u32 parts = max_u32(THREADS / t.count, 1);
    for (u32 e = i; e < t.count * parts; e += THREADS) atomic_add(&places[e % t.count], before(ranks, t.count, e % t.count, e / t.count, parts));
    barrier_lds();
    for (u32 e = i; e < t.count; e += THREADS) {
        if (places[e] < t.used) chosen[places[e]] = e;
    }
    barrier_lds();
    if (!GROUPED && t.bias == nullptr) most = logit_of(ranks[chosen[0]]);
    // Ranks are nearer than logits. Infinity, which stands for a NaN there, gives NaN as a difference, but not as a sigmoid.
    auto share = [&](u32 e) {
        const f32 logit = !GROUPED && t.bias == nullptr && t.sigmoid == 0 ? logit_of(ranks[e]) : mine[e];
        return t.sigmoid != 0 ? sigmoid_f32(logit) : exp_f32(logit - most);
    };
    const u32 terms = t.normalise != 0 ? t.used : t.sigmoid != 0 ? 0 : t.count;
    f32 sum = 0.0f;
    for (u32 e = i; e < terms; e += THREADS) sum += share(t.normalise != 0 ? chosen[e] : e);
    f32 total = teams_sum(sum, room);
    if (t.sigmoid != 0) total = t.normalise == 0 ? 1.0f : total < SUM_MIN ? SUM_MIN : total;
    for (u32 place = i; place < t.used; place += THREADS) {
        const u32 expert = chosen[place];
        const f32 weight = share(expert) / total * t.scale;
        t.experts[u64(row) * t.used + place] = padding ? NO_EXPERT : expert;
        t.weights[u64(row) * t.used + place] = padding ? 0.0f : weight;
        if (t.table != nullptr && t.absent != nullptr && !padding && t.table[expert] == 0) t.absent[0] = 1;
    }
}

} // namespace routing
