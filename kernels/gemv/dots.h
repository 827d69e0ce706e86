// The loop of all matrix-vector kernels: a *team* of 32 lanes (a wave, or half of one) multiplies R weight rows with up to M
// activation rows. Weights go from memory to registers, 16 bytes a load, in one pass for all M rows.
//
// Lane l of a team takes units l, l + 32, l + 64, ... of a row and sums in that order; a fixed tree joins the 32 sums. Neither
// M nor R nor the number of blocks changes the order: a row's result has the same bits however it is batched.
#pragma once
#include "../prelude/order.h"
#include "tiles.h"

constexpr u32 TEAM = 32;
constexpr u32 TEAMS = 256 / TEAM;

DEV u32 team() { return thread_id() / TEAM; }
DEV u32 member() { return thread_id() % TEAM; }

// R rows of weights, `units` units each.
template <class T, u32 R> struct Rows {
    typename T::View row[R];

    // Loads unit `u` of each row. Past the end it loads the last unit again; the activations there are zeros.
    DEV void load(u32 u, u32 units, typename T::Raw (&raw)[R]) const {
        const u32 inside = min_u32(u, units - 1);
        UNROLL for (u32 r = 0; r < R; r++) raw[r] = T::load(row[r], inside);
    }
};

// Sums V values over a team at once: lane l ends with the sum of value l / (32 / V). At each step a lane exchanges half of its
// values with its partner, so V values cost about V + log2(32 / V) exchanges. Each sum's tree is the same for all V.
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

// The activations that a block works on, and whether all of them are in LDS.
template <class Tile> struct Activations {
    typename Tile::In in;
    u32 row, rows;     // rows `row .. row + rows` of `in`
    u32 units;         // units of a row
    bool staged;       // an earlier item left whole rows in the tile
};

// U units of each row, from unit `at` of the row.
template <class T, u32 R, u32 U> struct Step {
    typename T::Raw raw[U][R];

    DEV void load(const Rows<T, R>& w, u32 at, u32 units) {
        UNROLL for (u32 u = 0; u < U; u++) w.load(at + u * TEAM + member(), units, raw[u]);
    }
    // A step is whole blocks of 8 groups, so a lane's groups all have the same place in their block.
    template <u32 M, class Tile> DEV void multiply(const Tile& tile, u32 in_tile, f32 (&sums)[R * M]) const {
        UNROLL for (u32 u = 0; u < U; u++) tile.template multiply<T, R>(raw[u], member(), in_tile + u * TEAM + member(), sums);
    }
};

// Whether the compiler must be told that a step's loads come before the other step's arithmetic. For 8 rows of Q6_K it keeps
// them there by itself, and a lane of gfx10 would need one register more than it has.
template <class T, u32 M, class Tile> constexpr bool ORDERS_LOADS = Tile::LOADS_FIRST;
#if defined(__GFX10__)
template <class Tile> constexpr bool ORDERS_LOADS<Q6_K, 8, Tile> = false;
#endif

// Takes a block through the items of a job, each a set of R rows a team:
//   job.items               number of items, the same for the whole block
//   job.rows_of(i)          the rows of item i
//   job.first_use()         runs once, after the first loads are issued
//   job.begin(i)            runs before the sums of item i start
//   job.end(i, sums)        gets this lane's part of them: sums[r * M + m] of row r and activation row m
// The whole block calls.
//
// Steps go in pairs: while one is multiplied the other loads, also from one item to the next. So until its last step a team
// always has loads in flight. AHEAD: both steps of the first pair are on their way before the first use.
template <class T, u32 R, u32 U, u32 M, bool AHEAD, class Tile, class Job>
DEV void stream(Tile& tile, Activations<Tile>& a, Job& job) {
    constexpr u32 STEP = TEAM * U;
    static_assert(Tile::UNITS % (2 * STEP) == 0 && TEAM % 8 == 0, "a tile holds whole pairs, a step whole blocks");
    Rows<T, R> w = job.rows_of(0);
    Step<T, R, U> even, odd;
    f32 sums[R * M];
    even.load(w, 0, a.units);
    if constexpr (AHEAD) odd.load(w, STEP, a.units);
    job.first_use();
    ROLLED for (u32 item = 0; item < job.items; item++) {
        UNROLL for (u32 i = 0; i < R * M; i++) sums[i] = 0.0f;
        job.begin(item);
        ROLLED for (u32 at = 0; at < a.units; at += 2 * STEP) {
            const u32 in_tile = at % Tile::UNITS;
            if (in_tile == 0 && !a.staged) {
                const u32 count = ceil_div(min_u32(Tile::UNITS, a.units - at), 2 * STEP) * (2 * STEP);
                barrier_lds();
                tile.stage(a.in, a.row, a.rows, at, count, a.units);
                barrier_lds();
                a.staged = a.units <= Tile::UNITS;
            }
            if constexpr (!AHEAD) odd.load(w, at + STEP, a.units);
            if constexpr (!AHEAD && ORDERS_LOADS<T, M, Tile>) keep_order();
            even.template multiply<M>(tile, in_tile, sums);
            u32 then = at + 2 * STEP;
            if (then >= a.units) {
                // After the last item its first units are loaded again and not used.
                w = job.rows_of(min_u32(item + 1, job.items - 1));
                then = 0;
            }
            even.load(w, then, a.units);
            if constexpr (ORDERS_LOADS<T, M, Tile>) keep_order();
            odd.template multiply<M>(tile, in_tile + STEP, sums);
            if constexpr (AHEAD) odd.load(w, then + STEP, a.units);
            if constexpr (AHEAD && ORDERS_LOADS<T, M, Tile>) keep_order();
        }
        job.end(item, sums);
    }
}
