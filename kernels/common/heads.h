// A head before attention: its norm and its rotation, by 32 lanes.
#pragma once
#include "pages.h"
#include "reduce.h"

// Most pairs of a head that a lane holds: 256 values over 32 lanes.
constexpr u32 PAIRS_MAX = 4;

// What a lane multiplies its pairs by: a norm's weights, and cosines and sines of angles. They do not depend on the launch before.
struct HeadFactors {
    f32 a[PAIRS_MAX], b[PAIRS_MAX], cos[PAIRS_MAX], sin[PAIRS_MAX];
    bool weighs, turns;
};

// One head of one row, spread over the lanes of a team: lane l holds pairs l, l + 32, ...; rotated pairs come first.
struct Head {
    f32 a[PAIRS_MAX], b[PAIRS_MAX];
    u32 head_dim, rope_dims;
    bool halves;

    DEV u32 pair(u32 i) const { return team_lane() + i * TEAM; }
    DEV bool holds(u32 i) const { return pair(i) * 2 < head_dim; }
    DEV bool by_halves(u32 i) const { return halves && pair(i) < rope_dims / 2; }
    DEV u32 first(u32 i) const { return by_halves(i) ? pair(i) : 2 * pair(i); }
    DEV u32 second(u32 i) const { return by_halves(i) ? pair(i) + rope_dims / 2 : 2 * pair(i) + 1; }

    DEV void load(const f32* x) {
        UNROLL for (u32 i = 0; i < PAIRS_MAX; i++) {
            a[i] = b[i] = 0.0f;
            if (!holds(i)) continue;
            a[i] = x[first(i)];
            b[i] = x[second(i)];
        }
    }

    // Either may be null: the head has no norm, or is not rotated.
    DEV HeadFactors factors(const f32* weight, const f32* angles) const {
        HeadFactors f;
        f.weighs = weight != nullptr, f.turns = angles != nullptr;
        UNROLL for (u32 i = 0; i < PAIRS_MAX; i++) {
            f.a[i] = f.b[i] = f.cos[i] = f.sin[i] = 0.0f;
            if (f.weighs && holds(i)) f.a[i] = weight[first(i)], f.b[i] = weight[second(i)];
            if (f.turns && pair(i) < rope_dims / 2) f.cos[i] = angles[2 * pair(i)], f.sin[i] = angles[2 * pair(i) + 1];
        }
        return f;
    }

    // Every team of a wave takes part in the sums, also a team whose head has no norm.
    DEV void norm(const HeadFactors& f, f32 eps) {
        f32 sum = 0.0f;
        UNROLL for (u32 i = 0; i < PAIRS_MAX; i++) sum = fma_f32(a[i], a[i], fma_f32(b[i], b[i], sum));
        f32 factor = 1.0f / sqrt_f32(team_sum(sum) / (f32)head_dim + eps);
        UNROLL for (u32 i = 0; i < PAIRS_MAX; i++) {
            if (!f.weighs || !holds(i)) continue;
            a[i] = a[i] * factor * f.a[i];
            b[i] = b[i] * factor * f.b[i];
        }
    }

    DEV void rotate(const HeadFactors& f) {
        UNROLL for (u32 i = 0; i < PAIRS_MAX; i++) {
            if (!f.turns || pair(i) >= rope_dims / 2) continue;
            const f32 x = a[i];
            a[i] = x * f.cos[i] - b[i] * f.sin[i];
            b[i] = x * f.sin[i] + b[i] * f.cos[i];
        }
    }

    DEV void clear() {
        UNROLL for (u32 i = 0; i < PAIRS_MAX; i++) a[i] = b[i] = 0.0f;
    }

    DEV void scale(f32 by) {
        UNROLL for (u32 i = 0; i < PAIRS_MAX; i++) {
            a[i] *= by;
            b[i] *= by;
        }
    }

    template <class T> DEV void store(T* out) const {
        UNROLL for (u32 i = 0; i < PAIRS_MAX; i++) {
            if (!holds(i)) continue;
            to_element(a[i], out[first(i)]);
            to_element(b[i], out[second(i)]);
        }
    }

    // Bits of the greatest magnitude among the lane's values of a group.
    DEV u32 most_of(u32 group) const {
        u32 most = 0;
        UNROLL for (u32 i = 0; i < PAIRS_MAX; i++) {
            if (!holds(i)) continue;
            if (first(i) / KV_GROUP == group) most = max_u32(most, as_u32(abs_f32(a[i])));
            if (second(i) / KV_GROUP == group) most = max_u32(most, as_u32(abs_f32(b[i])));
        }
        return most;
    }
};

// What a head's elements in pages need beside its values: nothing, or codes and their scales.
template <class T> struct HeadScales {
    // Every team of a wave takes part.
    DEV void measure(const Head&) {}
    DEV void store(const Head& head, T* out, f16*) const { head.store(out); }
    // Stores the head as a token of a page. `plane`: where the page's keys, or values, of this head begin.
    DEV void store_token(const Head& head, T* plane, u32 token) const { head.store(plane + (u64)token * head.head_dim); }
};
template <> struct HeadScales<i8> {
    // Of the group with the lane's number.
    KvScale own;
    i8 a[PAIRS_MAX], b[PAIRS_MAX];

    DEV void measure(const Head& head) {
        u32 mine = 0;
        UNROLL for (u32 group = 0; group < KV_GROUPS_MAX; group++) {
            if (group * KV_GROUP >= head.head_dim) continue;
            u32 most = head.most_of(group);
            UNROLL for (u32 mask = 1; mask < TEAM; mask *= 2) most = max_u32(most, shfl_xor(most, mask));
            if (team_lane() == group) mine = most;
        }
        own = KvScale::of(mine);
        const u32 team = lane() / TEAM * TEAM;
        UNROLL for (u32 i = 0; i < PAIRS_MAX; i++) {
            // A lane without the pair takes the first group's scale, and its code is not used.
            const u32 holds = head.holds(i);
            a[i] = KvScale::code(head.a[i], shfl(own.inverse, team + holds * head.first(i) / KV_GROUP));
            b[i] = KvScale::code(head.b[i], shfl(own.inverse, team + holds * head.second(i) / KV_GROUP));
        }
    }
    DEV void store(const Head& head, i8* codes, f16* scales) const {
        UNROLL for (u32 i = 0; i < PAIRS_MAX; i++) {
            if (!head.holds(i)) continue;
            codes[head.first(i)] = a[i];
            codes[head.second(i)] = b[i];
        }
        if (team_lane() < head.head_dim / KV_GROUP) scales[team_lane()] = own.scale;
    }
    DEV void store_token(const Head& head, i8* plane, u32 token) const {
        store(head, plane + (u64)token * head.head_dim, scales_of(plane, token, head.head_dim));
    }
};
