// Rows of a sequence, one after the other, for operations whose state is a matrix of each head.
//
// A block has STRIPE_OF_TEAM outputs of a head for each of its teams. SHARERS neighbouring lanes have PAIR neighbouring outputs
// and sum over the other dimension of the state, at most MAX values: lane l of them has values 32 * i + 4 * l + j in registers,
// from a sequence's first row to its last.
//
// Each team fetches some of the next rows while the block computes those before. What is the same for all outputs is computed once
// for the block and handed over in LDS. So a row's bits depend neither on the number of threads nor on the rows that a step has:
// all sums are those of one team, or of SHARERS lanes.
#pragma once
#include "../common/activation.h"
#include "../common/reduce.h"
#include "../prelude/order.h"
#include "runs.h"

constexpr u32 SHARERS = 8, PAIR = 2;
constexpr u32 STRIPE_OF_TEAM = TEAM / SHARERS * PAIR;
constexpr u32 BLOCK_TEAMS = 8;

DEV u32 sharer() { return thread_id() % SHARERS; }
// Outputs of the block, and the first of this lane's among them.
DEV u32 stripe() { return block_threads() / SHARERS * PAIR; }
DEV u32 pair_at() { return thread_id() / SHARERS * PAIR; }

// ln(1 + e^x). e^-|x| is at most 1: of the series of ln(1 + e) = 2 artanh(e / (2 + e)), what follows seven terms is below 2^-26
// of the sum. It is exact where 1 + e would round to 1.
DEV f32 softplus_f32(f32 x) {
    const f32 e = exp_f32(-abs_f32(x)), s = e / (2.0f + e), square = s * s;
    f32 sum = 1.0f / 13.0f;
    sum = fma_f32(sum, square, 1.0f / 11.0f);
    sum = fma_f32(sum, square, 1.0f / 9.0f);
    sum = fma_f32(sum, square, 1.0f / 7.0f);
    sum = fma_f32(sum, square, 1.0f / 5.0f);
    sum = fma_f32(sum, square, 1.0f / 3.0f);
    sum = fma_f32(sum, square, 1.0f);
    return max_f32(x, 0.0f) + 2.0f * s * sum;
}

// Four values of a vector of `dim`, a multiple of 4, without a branch, so that many loads are in flight together. What is past its
// end holds others of its values until `end_four`.
DEV Four begin_four(const f32* vector, u32 k, u32 dim) {
    const u32x4 raw = load16(vector + min_u32(k, dim - 4));
    return {{as_f32(raw.x), as_f32(raw.y), as_f32(raw.z), as_f32(raw.w)}};
}
DEV Four end_four(const Four& x, u32 k, u32 dim) {
    Four y;
    UNROLL for (u32 j = 0; j < 4; j++) y.v[j] = k < dim ? x.v[j] : 0.0f;
    return y;
}

// Two vectors of a row, its values of the stripe, and numbers: what a team has fetched.
template <u32 MAX> struct Fetched {
    static constexpr u32 FOURS = (MAX + 4 * TEAM - 1) / (4 * TEAM), VALUES = BLOCK_TEAMS * STRIPE_OF_TEAM / TEAM;
    Four first[FOURS], second[FOURS];
    f32 values[VALUES];
    f32 numbers[2];

    // `dim` values of each vector; of the stripe `outputs`.
    DEV void begin(const f32* a, const f32* b, u32 dim, const f32* of_stripe, u32 outputs) {
        UNROLL for (u32 i = 0; i < FOURS; i++) {
            first[i] = begin_four(a, place(i), dim);
            second[i] = begin_four(b, place(i), dim);
        }
        UNROLL for (u32 i = 0; i < VALUES; i++) values[i] = of_stripe[min_u32(TEAM * i + team_lane(), outputs - 1)];
    }
    // The loads must have arrived from here on.
    DEV void end(u32 dim) {
        UNROLL for (u32 i = 0; i < FOURS; i++) {
            first[i] = end_four(first[i], place(i), dim);
            second[i] = end_four(second[i], place(i), dim);
        }
    }
    DEV static u32 place(u32 i) { return 4 * (TEAM * i + team_lane()); }
};

// The same of several rows in LDS, and the numbers that all outputs share.
template <u32 MAX> struct Staged {
    // Rows that a team fetches at a time: wider rows would take too many registers.
    static constexpr u32 EACH = MAX > 128 ? 1 : 2, ROWS = EACH * BLOCK_TEAMS;
    f32 first[ROWS][MAX], second[ROWS][MAX];
    f32 values[ROWS][BLOCK_TEAMS * STRIPE_OF_TEAM];
    f32 numbers[ROWS][4];

    // Writes the team's row as row i, the vectors times a factor each.
    DEV void put(u32 i, const Fetched<MAX>& row, f32 factor, f32 factor2) {
        UNROLL for (u32 n = 0; n < Fetched<MAX>::FOURS; n++) {
            const u32 k = row.place(n);
            if (k < MAX) {
                put_four(first[i] + k, row.first[n], factor);
                put_four(second[i] + k, row.second[n], factor2);
            }
        }
        UNROLL for (u32 n = 0; n < Fetched<MAX>::VALUES; n++) {
            const u32 k = TEAM * n + team_lane();
            if (k < stripe()) values[i][k] = row.values[n];
        }
    }
    DEV static void put_four(f32* to, const Four& x, f32 factor) {
        store16(to, {as_u32(x.v[0] * factor), as_u32(x.v[1] * factor), as_u32(x.v[2] * factor), as_u32(x.v[3] * factor)});
    }
    DEV void put_number(u32 i, u32 which, f32 number) {
        if (team_lane() == 0) numbers[i][which] = number;
    }
};

// This lane's share of a vector in LDS.
template <u32 MAX> struct Share {
    Four v[MAX / 32];

    DEV Share(const f32 (&vector)[MAX]) {
        UNROLL for (u32 i = 0; i < MAX / 32; i++) {
            const u32x4 raw = load16(vector + 32 * i + 4 * sharer());
            v[i] = {{as_f32(raw.x), as_f32(raw.y), as_f32(raw.z), as_f32(raw.w)}};
        }
    }
};

// Writes 0 to the outputs of a padding row.
DEV void clear_outputs(f32* out, u32 outputs) {
    for (u32 i = thread_id(); i < min_u32(stripe(), outputs); i += block_threads()) out[i] = 0.0f;
}

// Computes all rows of the block's sequence. JOB has
//   outputs()            the block's outputs of a row, which begin at out(row)
//   fetch(row)           starts to fetch a row of the step
//   stage(i, fetched)    writes what its team has fetched as row i in LDS
//   step(i, results)     makes the PAIR results of row i in LDS, the same in all sharers
//   load(s), store(s)    the block's part of the state
template <u32 MAX, class JOB> DEV void compute_rows(JOB& job, const Run& run, u64 state_offset) {
    constexpr u32 EACH = Staged<MAX>::EACH;
    const u32 teams = block_threads() / TEAM, mine = pair_at() + sharer(), last = run.first + run.rows - 1;
    Fetched<MAX> fetched[EACH];
    UNROLL for (u32 e = 0; e < EACH; e++) fetched[e] = job.fetch(min_u32(run.first + e * teams + team_id(), last));
    if (run.before != 0) job.load(run.old_state(state_offset));
    for (u32 at = run.first; at <= last; at += EACH * teams) {
        barrier_lds();
        UNROLL for (u32 e = 0; e < EACH; e++) {
            // The same for the whole block: teams of a wave stay together.
            if (at + e * teams <= last) job.stage(e * teams + team_id(), fetched[e]);
        }
        barrier_lds();
        UNROLL for (u32 e = 0; e < EACH; e++) fetched[e] = job.fetch(min_u32(at + (EACH + e) * teams + team_id(), last));
        keep_order();
        const u32 staged = min_u32(EACH * teams, last + 1 - at);
        for (u32 i = 0; i < staged; i++) {
            f32 results[PAIR];
            job.step(i, results);
            if (sharer() < PAIR && mine < job.outputs()) job.out(at + i)[mine] = sharer() == 0 ? results[0] : results[1];
        }
    }
    job.store(run.new_state(state_offset));
}
