// Products on the matrix unit of a wave (prelude.h): both operands in registers, x by way of LDS.
#pragma once
#include "tile.h"

#if HAS_MATRIX_UNIT

// A step has so many passes; in each, a lane decodes one group of each of its weight rows.
constexpr u32 PASSES = GROUPS / Strip::K_LANES, HELD = Strip::HELD;

// M rows of x in LDS, for one step, in parts of 16 bytes. Part q of group t of a row is part 4 q + t; every other row swaps
// parts with those 4 away. So lanes that read one part of four groups of two rows find eight different banks.
template <u32 M> struct Rows {
    f16 v[M * STEP];
    DEV f16* part(u32 row, u32 group, u32 q) { return v + row * STEP + ((4 * q + group) ^ (row % 2 * 4)) * 8; }
};

template <u32 M> struct Input {
    // Of each row of which the thread copies a part: that part of the first step.
    const f16* part[M / 16];
    u32 groups;

    // The block's rows: the first M of `which`, or as many as there are, the last one again and again.
    template <class Which> DEV Input(const f16* x, u32 stride, u32 groups, const Which& which) : groups(groups) {
        UNROLL for (u32 i = 0; i < M / 16; i++) {
            const u32 r = min_u32(thread_id() / 16 + 16 * i, which.count - 1);
            part[i] = x + u64(which.from(r)) * stride + group() * 32 + quarter() * 8;
        }
    }
    // Neighbouring threads fill neighbouring banks.
    DEV static u32 group() { return thread_id() % 4; }
    DEV static u32 quarter() { return thread_id() / 4 % 4; }

    // Copies a step into LDS; zeros past the last group.
    DEV void stage(Rows<M>& to, u32 step) const {
        const bool is_there = step * GROUPS + group() < groups;
        UNROLL for (u32 i = 0; i < M / 16; i++) {
            f16* at = to.part(thread_id() / 16 + 16 * i, group(), quarter());
            const f16* from = part[i] + u64(step) * STEP;
#if HAS_ASYNC_COPY
            if (is_there) copy16_async(at, from);
#else
            if (is_there) store16(at, load16(from));
#endif
            else store16(at, {0, 0, 0, 0});
        }
    }
};

template <u32 M> struct LaneSums {
    Frag::C c[M / 16][ACROSS];

    DEV void clear() {
        UNROLL for (u32 i = 0; i < M / 16; i++) {
            UNROLL for (u32 j = 0; j < ACROSS; j++) c[i][j] = Frag::zero();
        }
    }
    template <class T> DEV void add(Rows<M>& x, const LaneWeights<T, Strip>& weights, const Loaded<T, Strip>& loaded, u32 pass) {
        const u32 g = weights.group(pass);
        Group group[ACROSS][HELD];
        Large large[ACROSS];
        UNROLL for (u32 j = 0; j < ACROSS; j++) {
            UNROLL for (u32 h = 0; h < HELD; h++) group[j][h] = decode_for_words<T>(loaded.raw[j][h], g);
            large[j] = limit_groups<T>(group[j]);
        }
        UNROLL for (u32 half = 0; half < 2; half++) {
            Strip w[ACROSS];
            UNROLL for (u32 j = 0; j < ACROSS; j++) {
                UNROLL for (u32 h = 0; h < HELD; h++) {
                    const Factors by = factors<T>(group[j][h], half);
                    u32 words[4][2];
                    UNROLL for (u32 i = 0; i < 4; i++) {
                        decode_word<T>(group[j][h], 4 * half + i, by, words[i]);
                        if (large[j].any) {
                            UNROLL for (u32 b = 0; b < 2; b++) words[i][b] = large[j].mine ? within_f16x2(words[i][b]) : words[i][b];
                        }
                    }
                    UNROLL for (u32 q = 0; q < 2; q++) {
                        w[j].v[h][q] = {words[2 * q][0], words[2 * q][1], words[2 * q + 1][0], words[2 * q + 1][1]};
                    }
                }
            }
            UNROLL for (u32 i = 0; i < M / 16; i++) {
                Strip a;
                UNROLL for (u32 h = 0; h < HELD; h++) {
                    UNROLL for (u32 q = 0; q < 2; q++) a.v[h][q] = load16(x.part(16 * i + Strip::held(h), g % GROUPS, 2 * half + q));
                }
                UNROLL for (u32 j = 0; j < ACROSS; j++) c[i][j] = Strip::mma(a, w[j], c[i][j]);
            }
        }
    }
    // The lane's sums as a list.
    static constexpr u32 SIZE = Frag::C::SIZE, COUNT = M / 16 * ACROSS * SIZE;
    DEV f32 at(u32 i) const { return c[i / (ACROSS * SIZE)][i / SIZE % ACROSS].get(i % SIZE); }
    DEV void set_at(u32 i, f32 v) { c[i / (ACROSS * SIZE)][i / SIZE % ACROSS].set(i % SIZE, v); }

    // Writes the sums, those of 16 rows at a time.
    template <class Which> DEV void put(const Out<Which>& out) const {
        UNROLL for (u32 i = 0; i < M / 16; i++) {
            u32 r[ACROSS * SIZE], o[ACROSS * SIZE];
            f32 sums[ACROSS * SIZE];
            UNROLL for (u32 j = 0; j < ACROSS; j++) {
                UNROLL for (u32 l = 0; l < SIZE; l++) {
                    r[j * SIZE + l] = 16 * i + Frag::C::row(l);
                    o[j * SIZE + l] = (wave() * ACROSS + j) * 16 + Frag::C::col(l);
                    sums[j * SIZE + l] = c[i][j].get(l);
                }
            }
            out.put(r, o, sums);
        }
    }
};

// Adds the sums of steps `begin` .. `end`. Weights come two passes ahead of their use, x one step.
template <class T, u32 M>
DEV void multiply_lanes(Rows<M> (&stages)[2], const Input<M>& input, const LaneWeights<T, Strip>& weights, u32 begin, u32 end, LaneSums<M>& sums) {
    u32 pass = begin * PASSES;
    const u32 passes = end * PASSES;
    Loaded<T, Strip> one = weights.load(pass), two = weights.load(min_u32(pass + 1, passes - 1));
    wait_for_predecessor_alone();
    input.stage(stages[begin % 2], begin);
    const auto turn = [&](Loaded<T, Strip>& loaded) {
        const u32 step = pass / PASSES;
        if (pass % PASSES == 0) {
#if HAS_ASYNC_COPY
            end_copies();
            wait_copies<0>();
#endif
            // All threads have filled this stage, and have read the other one.
            barrier_lds();
            if (step + 1 < end) input.stage(stages[(step + 1) % 2], step + 1);
        }
        const Loaded<T, Strip> current = loaded;
        loaded = weights.load(min_u32(pass + 2, passes - 1));
        sums.add(stages[step % 2], weights, current, pass);
        pass++;
    };
    ROLLED while (pass < passes) {
        turn(one);
        if (PASSES > 1 || pass < passes) turn(two);
    }
}

template <u32 ROWS> struct Lanes {
    static constexpr u32 M = ROWS;
    using Sums = LaneSums<M>;
    template <class T> using Weights = LaneWeights<T, Strip>;
    template <class T, class Which>
    DEV static void multiply(const f16* x, u32 stride, const Which& which, const LaneWeights<T, Strip>& weights, u32 begin, u32 end, Sums& sums) {
        LDS(stages, Rows<M>[2]);
        multiply_lanes<T, M>(stages, Input<M>(x, stride, weights.groups, which), weights, begin, end, sums);
    }
};

#endif
