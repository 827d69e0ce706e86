// Online softmax of decode attention: the state that a group of lanes keeps while it walks its tokens.
//
// A group is LANES lanes, each with PART values of every head. One group reads a token's key and value. Scores are in units of
// log2 (splits.h).
#pragma once
#include "../common/pages.h"
#include "../common/reduce.h"
#include "splits.h"

namespace attn_decode {

// Values of a head that a lane holds.
constexpr u32 PART = 8;

// Part of a token's key or value: 8 elements as the page holds them.
template <class T> struct Raw;
template <> struct Raw<f16> {
    u32x4 v;
    DEV void load(const Token<f16>& token, u32 part) { v = load16(token.values + part * PART); }
    DEV void clear() { v = {0, 0, 0, 0}; }
    DEV void unpack(f32 (&x)[PART]) const {
        f32x2 a = unpack_f16x2(v.x), b = unpack_f16x2(v.y), c = unpack_f16x2(v.z), d = unpack_f16x2(v.w);
        x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y, x[4] = c.x, x[5] = c.y, x[6] = d.x, x[7] = d.y;
    }
};
template <> struct Raw<f32> {
    u32x4 low, high;
    DEV void load(const Token<f32>& token, u32 part) {
        low = load16(token.values + part * PART), high = load16(token.values + part * PART + 4);
    }
    DEV void clear() { low = {0, 0, 0, 0}, high = {0, 0, 0, 0}; }
    DEV void unpack(f32 (&x)[PART]) const {
        x[0] = as_f32(low.x), x[1] = as_f32(low.y), x[2] = as_f32(low.z), x[3] = as_f32(low.w);
        x[4] = as_f32(high.x), x[5] = as_f32(high.y), x[6] = as_f32(high.z), x[7] = as_f32(high.w);
    }
};

template <> struct Raw<i8> {
    u32x2 v;
    f16 scale;
    DEV void load(const Token<i8>& token, u32 part) {
        v = load8(token.values + part * PART), scale = token.scales[part * PART / KV_GROUP];
    }
    DEV void clear() { v = {0, 0}, scale = f16_from_bits(0); }
    // Without the scale: a product with it for each score or weight is cheaper than for each value.
    DEV void unpack(f32 (&x)[PART]) const {
        f32 low[4], high[4];
        from_codes(v.x, low), from_codes(v.y, high);
        UNROLL for (u32 i = 0; i < 4; i++) x[i] = low[i], x[i + 4] = high[i];
    }
    DEV f32 factor() const { return f16_to_f32(scale); }
};

// U x G scores of a group of LANES lanes, summed over the group; each lane ends with R of them. The score of token u and query
// g has number g * U + u. With fewer scores than lanes, SHARE neighbouring lanes end with the same scores.
template <u32 LANES, u32 G, u32 U> struct Scores {
    static constexpr u32 N = U * G, SHARE = N < LANES ? LANES / N : 1, R = N > LANES ? N / LANES : 1;
    static_assert((N & (N - 1)) == 0 && R <= U, "a lane's scores are of one query");

    // Number of the lane's score r.
    DEV static u32 number(u32 r) { return lane() % LANES / SHARE * R + r; }
    DEV static u32 token(u32 r) { return number(r) % U; }
    // The lane that holds score `number`; there it is score number % R.
    DEV static u32 holder(u32 number) { return lane() / LANES * LANES + number / R * SHARE; }

    // At each step a lane sends its partner the half of the sums that the partner keeps: N - 1 exchanges, not N log2(LANES).
    template <u32 LEFT, u32 MASK> DEV static void sum(f32 (&v)[N]) {
        if constexpr (MASK > 0) {
            constexpr u32 KEEP = LEFT > 1 ? LEFT / 2 : 1;
            bool upper = (lane() & MASK) != 0;
            UNROLL for (u32 i = 0; i < KEEP; i++) {
                if constexpr (LEFT > 1) {
                    f32 mine = upper ? v[i + KEEP] : v[i], given = upper ? v[i] : v[i + KEEP];
                    v[i] = mine + shfl_xor(given, MASK);
                } else {
                    v[i] += shfl_xor(v[i], MASK);
                }
            }
            sum<KEEP, MASK / 2>(v);
        }
    }
};

// Online softmax of G queries over the tokens of one group of lanes, U at a time. Lane l of LANES holds values 8l..8l+8 of a
// head. `most` and `sum` belong to the query whose scores the lane ends with; `sum` counts the lane's own tokens.
template <u32 LANES, u32 G, u32 U> struct State {
    using S = Scores<LANES, G, U>;
    f32 most = NO_SCORE, sum = 0.0f, values[G][PART];

    DEV State() {
        UNROLL for (u32 g = 0; g < G; g++) {
            UNROLL for (u32 d = 0; d < PART; d++) values[g][d] = 0.0f;
        }
    }

    // Adds U tokens. The lane's group has token u where `tokens` > u; the others do not count, whatever they hold. `queries`:
    // the lane's part of each query, in LDS, LANES * PART values apart.
    template <class T> DEV void add(const f32* queries, const Raw<T> (&keys)[U], const Raw<T> (&vals)[U], u32 tokens,
                                f32 cap) {
        f32 score[S::N], key[U][PART];
        UNROLL for (u32 u = 0; u < U; u++) keys[u].unpack(key[u]);
        UNROLL for (u32 g = 0; g < G; g++) {
            const f32x4 low = *(const f32x4*)(queries + g * LANES * PART), high = *(const f32x4*)(queries + g * LANES * PART + 4);
            const f32 q[PART] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            UNROLL for (u32 u = 0; u < U; u++) {
                f32 dot = 0.0f;
                UNROLL for (u32 d = 0; d < PART; d++) dot = fma_f32(q[d], key[u][d], dot);
                if constexpr (IS_CODED<T>) dot *= keys[u].factor();
                score[g * U + u] = dot;
            }
        }
        S::template sum<S::N, LANES / 2>(score);
        UNROLL for (u32 r = 0; r < S::R; r++) score[r] = capped(score[r], cap);
        f32 top = most;
        UNROLL for (u32 r = 0; r < S::R; r++) top = S::token(r) < tokens ? max_f32(top, score[r]) : top;
        UNROLL for (u32 mask = 1; mask < U / S::R; mask *= 2) top = max_f32(top, shfl_xor(top, mask * S::SHARE));
        f32 factor = exp2_f32(most - top);
        sum *= factor;
        UNROLL for (u32 r = 0; r < S::R; r++) {
            score[r] = S::token(r) < tokens ? exp2_f32(score[r] - top) : 0.0f;
            sum += score[r];
        }
        // Most tokens raise no maximum. A factor of 1 changes no bit, so a rescale for other lanes' maxima is harmless.
        if (any(top != most)) {
            UNROLL for (u32 g = 0; g < G; g++) rescale(g, shfl(factor, S::holder(g * U)));
        }
        most = top;
        UNROLL for (u32 u = 0; u < U; u++) {
            f32 value[PART];
            vals[u].unpack(value);
            UNROLL for (u32 d = 0; d < PART; d++) value[d] = u < tokens ? value[d] : 0.0f;
            f32 of_codes = 1.0f;
            if constexpr (IS_CODED<T>) of_codes = u < tokens ? vals[u].factor() : 0.0f;
            UNROLL for (u32 g = 0; g < G; g++) {
                f32 weight = shfl(score[(g * U + u) % S::R], S::holder(g * U + u));
                if constexpr (IS_CODED<T>) weight *= of_codes;
                UNROLL for (u32 d = 0; d < PART; d++) values[g][d] = fma_f32(weight, value[d], values[g][d]);
            }
        }
    }

    DEV void rescale(u32 g, f32 factor) {
        UNROLL for (u32 d = 0; d < PART; d++) values[g][d] *= factor;
    }
};

// A team's greatest scores, sums of weights and sums of weighted values, the same in all its lanes.
template <u32 LANES, u32 G> struct TeamState {
    f32 most[G], sum[G], values[G][PART];

    template <u32 U> DEV explicit TeamState(State<LANES, G, U>& of) {
        using S = Scores<LANES, G, U>;
        UNROLL for (u32 mask = 1; mask < U / S::R; mask *= 2) of.sum += shfl_xor(of.sum, mask * S::SHARE);
        UNROLL for (u32 g = 0; g < G; g++) {
            f32 group_most = shfl(of.most, S::holder(g * U));
            sum[g] = shfl(of.sum, S::holder(g * U));
            most[g] = group_most;
            UNROLL for (u32 mask = LANES; mask < TEAM; mask *= 2) most[g] = max_f32(most[g], shfl_xor(most[g], mask));
            f32 factor = exp2_f32(group_most - most[g]);
            sum[g] *= factor;
            UNROLL for (u32 d = 0; d < PART; d++) values[g][d] = of.values[g][d] * factor;
            UNROLL for (u32 mask = LANES; mask < TEAM; mask *= 2) {
                sum[g] += shfl_xor(sum[g], mask);
                UNROLL for (u32 d = 0; d < PART; d++) values[g][d] += shfl_xor(values[g][d], mask);
            }
        }
    }
};

} // namespace attn_decode
