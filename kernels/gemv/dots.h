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

// R rows of weights, `units` units each.
template <class T, u32 R> struct Rows {
    typename T::View row[R];

    // Loads unit `u` of each row; one past the end gives the last, which then meets zeros.
    DEV void load(u32 u, u32 units, typename T::Raw (&raw)[R]) const {
        const u32 inside = min_u32(u, units - 1);
        UNROLL for (u32 r = 0; r < R; r++) raw[r] = T::load(row[r], inside);
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
    bool staged;       // the whole row is in the tile, from an earlier item
};

// U units of each row, from unit `at` of the row.
template <class T, u32 R, u32 U> struct Step {
    typename T::Raw raw[U][R];

    DEV void load(const Rows<T, R>& w, u32 at, u32 units) {
        UNROLL for (u32 u = 0; u < U; u++) w.load(at + u * TEAM + member(), units, raw[u]);
    }
    // A step is whole blocks of 8 groups: a lane's groups have one place in their blocks.
    template <u32 M, class Tile> DEV void multiply(const Tile& tile, u32 in_tile, f32 (&sums)[R * M]) const {
        UNROLL for (u32 u = 0; u < U; u++) tile.template multiply<T, R>(raw[u], member(), in_tile + u * TEAM + member(), sums);
    }
};

// Takes a block through the items of a job, each a set of R rows a team:
//   job.items               how many, the same for the whole block
//   job.rows_of(i)             where the rows of item i are
//   job.first_use()         runs once the first loads are under way
//   job.begin(i)            runs before the sums of item i start
//   job.end(i, sums)        gets them: sums[r * M + m] of row r and activation row m, this lane's part
// Called by the whole block.
//
// Steps go in pairs: while one is multiplied the other is on its way, also from one item to the next, so that until the last the
// memory is never without a request of this team.
template <class T, u32 R, u32 U, u32 M, class Tile, class Job>
DEV void stream(Tile& tile, Activations<Tile>& a, Job& job) {
    constexpr u32 STEP = TEAM * U;
    static_assert(Tile::UNITS % (2 * STEP) == 0 && TEAM % 8 == 0, "a tile holds whole pairs, a step whole blocks");
    Rows<T, R> w = job.rows_of(0);
    Step<T, R, U> even, odd;
    f32 sums[R * M];
    even.load(w, 0, a.units);
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
            odd.load(w, at + STEP, a.units);
            even.template multiply<M>(tile, in_tile, sums);
            u32 then = at + 2 * STEP;
            if (then >= a.units) {
                // The last item loads its own rows' first units again, for nothing.
                w = job.rows_of(min_u32(item + 1, job.items - 1));
                then = 0;
            }
            even.load(w, then, a.units);
            odd.template multiply<M>(tile, in_tile + STEP, sums);
        }
        job.end(item, sums);
    }
}
