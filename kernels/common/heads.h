// A head before attention: its norm and its rotation, by 32 lanes.
#pragma once
#include "pages.h"
#include "reduce.h"

// Most pairs of a head that a lane holds: 256 values over 32 lanes.
constexpr u32 PAIRS_MAX = 4;

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

    // Every team of a wave takes part in the sums, also a team whose head has no norm.
    DEV void norm(const f32* weight, f32 eps) {
        f32 sum = 0.0f;
        UNROLL for (u32 i = 0; i < PAIRS_MAX; i++) sum = fma_f32(a[i], a[i], fma_f32(b[i], b[i], sum));
        f32 factor = 1.0f / sqrt_f32(team_sum(sum) / (f32)head_dim + eps);
        UNROLL for (u32 i = 0; i < PAIRS_MAX; i++) {
            if (!weight || !holds(i)) continue;
            a[i] = a[i] * factor * weight[first(i)];
            b[i] = b[i] * factor * weight[second(i)];
        }
    }

    DEV void rotate(const f32* angles) {
        UNROLL for (u32 i = 0; i < PAIRS_MAX; i++) {
            if (pair(i) >= rope_dims / 2) continue;
            f32 cos = angles[2 * pair(i)], sin = angles[2 * pair(i) + 1], x = a[i];
            a[i] = x * cos - b[i] * sin;
            b[i] = x * sin + b[i] * cos;
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
};
