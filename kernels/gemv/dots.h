// The loop of all matrix-vector kernels: R weight rows times up to M activation rows by a *team* of 32 lanes (a wave, or half of
// one). Weights go from memory to registers, 16 bytes a load, one pass over them for all M rows.
//
// Lane l of a team takes units l, l + 32, l + 64, ... of a row; the sum of a lane runs in that order, and the 32 sums meet in a
// fixed tree. Neither M nor R nor the number of blocks changes the order: a row's result has the same bits however it is batched.
#pragma once
#include "tiles.h"

constexpr u32 TEAM = 32;
constexpr u32 TEAMS = 256 / TEAM;

DEV u32 team() { return thread_id() / TEAM; }
DEV u32 member() { return thread_id() % TEAM; }

// R rows of VIEWS matrices (row r of matrix r / (R / VIEWS)): where they are, and where each begins, in units of the matrix.
template <class T, u32 VIEWS, u32 R> struct Rows {
    typename T::View view[VIEWS];
    u32 first[R];

    // Loads unit `u` of each row; one past the end gives the last, which then meets zeros.
    DEV void load(u32 u, u32 units, typename T::Raw (&raw)[R]) const {
        const u32 inside = min_u32(u, units - 1);
        UNROLL for (u32 r = 0; r < R; r++) raw[r] = T::load(view[r / (R / VIEWS)], first[r] + inside);
    }
};

// Sums V values over a team at once: lane l ends with the sum of value l / (32 / V). At each step half of the values go to the
// partner and half of its come back, so V values cost about V + log2(32 / V) exchanges; each sum's tree is the same for all V.
template <u32 V, u32 MASK = 16> DEV f32 team_sum(const f32 (&v)[V]) {
    if constexpr (MASK == 0) {
        static_assert(V == 1, "at most 32 values");
        return v[0];
    } else if constexpr (V == 1) {
        const f32 sum[1] = {v[0] + shfl_xor(v[0], MASK)};
        return team_sum<1, MASK / 2>(sum);
    } else {
        const bool upper = (member() & MASK) != 0;
        f32 half[V / 2];
        UNROLL for (u32 i = 0; i < V / 2; i++) {
            const f32 mine = upper ? v[i + V / 2] : v[i], theirs = upper ? v[i] : v[i + V / 2];
            half[i] = mine + shfl_xor(theirs, MASK);
        }
        return team_sum<V / 2, MASK / 2>(half);
    }
}

// Which activations a block works on, and whether they are all in LDS already.
template <class Tile> struct Activations {
    typename Tile::In in;
    u32 row, rows;     // rows `row .. row + rows` of `in`
    u32 units;         // units of a row
    bool staged;       // the whole row is in the tile, from an earlier call
};

// acc[r * M + m] = products of the rows `w` with the activation rows, per lane. Called by the whole block; U units of each row
// are on their way while the U before are multiplied. `before_use` runs once the first loads are under way.
template <class T, u32 VIEWS, u32 R, u32 U, u32 M, class Tile, class F>
DEV void dots(const Rows<T, VIEWS, R>& w, Tile& tile, Activations<Tile>& a, f32 (&acc)[R * M], F before_use) {
    static_assert(Tile::UNITS % (TEAM * U) == 0, "a tile holds whole steps");
    typename T::Raw now[U][R];
    UNROLL for (u32 u = 0; u < U; u++) w.load(u * TEAM + member(), a.units, now[u]);
    UNROLL for (u32 i = 0; i < R * M; i++) acc[i] = 0.0f;
    before_use();
    for (u32 first = 0; first < a.units; first += Tile::UNITS) {
        const u32 count = ceil_div(min_u32(Tile::UNITS, a.units - first), TEAM * U) * (TEAM * U);
        if (!a.staged) {
            barrier_lds();
            tile.stage(a.in, a.row, a.rows, first, count, a.units);
            barrier_lds();
        }
        for (u32 at = 0; at < count; at += TEAM * U) {
            typename T::Raw next[U][R];
            UNROLL for (u32 u = 0; u < U; u++) w.load(first + at + (U + u) * TEAM + member(), a.units, next[u]);
            UNROLL for (u32 u = 0; u < U; u++) {
                const u32 unit = at + u * TEAM + member();
                tile.template multiply<T, R>(now[u], first + unit, unit, acc);
            }
            UNROLL for (u32 u = 0; u < U; u++) {
                UNROLL for (u32 r = 0; r < R; r++) now[u][r] = next[u][r];
            }
        }
    }
    a.staged = a.units <= Tile::UNITS;
}
