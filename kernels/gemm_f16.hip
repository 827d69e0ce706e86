// gemm_f16: out[row][o] = x_scale[row] * sum over i < k of x[row][i] * w[o][i] (+ bias[o]) (+ out[row][o] where add is 1)
//
// For many rows: on matrix units where the target has them, else by fma.
// Shapes     w: f16[n][w_stride]; x: f16[rows][x_stride]; x_scale: f32[rows]; bias: f32[n], or null; out: f32[rows][out_stride]
//            Values of w and x between k and the stride are not used; those of out between n and the stride are not written
// Variants   gemm_f16_<SIDE>: a block computes SIDE rows x SIDE outputs. SIDE is 128, or 64 where that would leave most of a
//            device idle
// Launch     grid = (ceil(rows / SIDE), ceil(n / SIDE)), block = 256. Rows vary fastest, so that the blocks in flight share few
//            weights and find them in a cache
// Alignment  16 bytes for w and x. If k is not a multiple of 32 or a stride is not one of 8, values are read one by one
// Sums in    f32, over k in one order for all sizes and both SIDEs: steps of 32, within a step as the matrix unit adds
// Tolerance  |got - want| <= 2e-6 * sum of the terms' magnitudes + 1e-30; both variants give the same bits
// Reference  f64 sums in tests/kernels/matmul/gemm.rs
// Moves      4 * SIDE * k bytes in, 4 * SIDE * SIDE out per block; bound by arithmetic
#include "prelude/prelude.h"

constexpr u32 STEP = 32;
constexpr u32 WAVES = 256 / WAVE;

// SIDE x 32 values of one operand in LDS, for one step, in parts of 16 bytes.
#if HAS_ASYNC_COPY
template <u32 SIDE> struct Values {
    // Copies in flight need no registers: as many steps as fit 48 KB of LDS, the most without opting in; three or six.
    static constexpr u32 STAGES = 384 / SIDE;
    // Part p of row r lies at part p ^ r / 2 % 4. The parts of eight rows lie in different banks, with no gaps between rows.
    f16 v[SIDE * STEP];
    DEV f16* part(u32 row, u32 p) { return v + row * STEP + (p ^ (row / 2 % 4)) * 8; }
    DEV Frag::A a(u32 row, u32 k) const { return Frag::load_a_turned(v, row, k); }
    DEV Frag::B b(u32 col, u32 k) const { return Frag::load_bt_turned(v, col, k); }
};
#else
template <u32 SIDE> struct Values {
    static constexpr u32 STAGES = 2;
    // 40 values, 80 bytes a row: the 16-byte parts of eight rows lie in different banks.
    static constexpr u32 LD = STEP + 8;
    f16 v[SIDE * LD];
    DEV f16* part(u32 row, u32 p) { return v + row * LD + p * 8; }
#if HAS_MATRIX_UNIT
    DEV Frag::A a(u32 row, u32 k) const { return Frag::load_a_lds(v + row * LD + k, LD); }
    DEV Frag::B b(u32 col, u32 k) const { return Frag::load_bt_lds(v + col * LD + k, LD); }
#else
    DEV f32x2 pair(u32 row, u32 k) const { return unpack_f16x2(load4(v + row * LD + k)); }
#endif
};
#endif

template <u32 SIDE> struct Stage {
    Values<SIDE> x, w;
};
template <u32 SIDE> using Stages = Stage<SIDE>[Values<SIDE>::STAGES];

struct Operand {
    const f16* p;
    u32 rows, stride, k;
};

// The 16-byte parts of one operand that a thread moves in a step: numbers thread, thread + 256 of SIDE rows x 4 parts.
template <u32 SIDE> struct Parts {
    static constexpr u32 COUNT = SIDE * 4 / 256;
    u32x4 v[COUNT];

    DEV static u32 row(u32 i) { return (thread_id() + 256 * i) / 4; }
    DEV static u32 in_row() { return thread_id() % 4; }
    DEV void store(Values<SIDE>& values) const {
        UNROLL for (u32 i = 0; i < COUNT; i++) store16(values.part(row(i), in_row()), v[i]);
    }
};

// Whole steps of rows that begin at multiples of 16 bytes. Rows past the last read the last; their results are not stored.
template <u32 SIDE> struct WholeSteps {
    using P = Parts<SIDE>;
    const f16* from[P::COUNT];

    DEV WholeSteps(const Operand& m, u32 first_row) {
        UNROLL for (u32 i = 0; i < P::COUNT; i++) {
            from[i] = m.p + u64(min_u32(first_row + P::row(i), m.rows - 1)) * m.stride + P::in_row() * 8;
        }
    }
    // The parts of the next step. Never called past the last step.
    DEV P next() {
        P parts;
        UNROLL for (u32 i = 0; i < P::COUNT; i++) {
            parts.v[i] = load16(from[i]);
            from[i] += STEP;
        }
        return parts;
    }
#if HAS_ASYNC_COPY
    DEV void copy_next(Values<SIDE>& to) {
        UNROLL for (u32 i = 0; i < P::COUNT; i++) {
            copy16_async(to.part(P::row(i), P::in_row()), from[i]);
            from[i] += STEP;
        }
    }
#endif
};

// Any rows, any k: value by value, zeros past k.
template <u32 SIDE> struct AnySteps {
    using P = Parts<SIDE>;
    const f16* from[P::COUNT];
    u32 k, end;

    DEV AnySteps(const Operand& m, u32 first_row) : k(P::in_row() * 8), end(m.k) {
        UNROLL for (u32 i = 0; i < P::COUNT; i++) from[i] = m.p + u64(min_u32(first_row + P::row(i), m.rows - 1)) * m.stride;
    }
    DEV P next() {
        P parts;
        UNROLL for (u32 i = 0; i < P::COUNT; i++) {
            u32 words[4] = {0, 0, 0, 0};
            UNROLL for (u32 e = 0; e < 8; e++) {
                if (k + e < end) words[e / 2] |= u32(f16_bits(from[i][k + e])) << (16 * (e % 2));
            }
            parts.v[i] = {words[0], words[1], words[2], words[3]};
        }
        k += STEP;
        return parts;
    }
};

struct Out {
    f32* p;
    const f32 *scale, *bias;
    u32 rows, n, stride, add;

    DEV void put(u32 row, u32 col, f32 sum) const {
        if (row >= rows || col >= n) return;
        f32* at = p + u64(row) * stride + col;
        f32 v = scale[row] * sum;
        if (bias != nullptr) v += bias[col];
        if (add != 0) v += *at;
        *at = v;
    }
};

#if HAS_MATRIX_UNIT
// A wave's part of the tile: the waves form two rows.
template <u32 SIDE> struct Sums {
    static constexpr u32 WAVE_COLS = SIDE / (WAVES / 2), DOWN = SIDE / 2 / 16, ACROSS = WAVE_COLS / 16;
    Frag::C c[DOWN][ACROSS];

    DEV static u32 first_row() { return wave() % 2 * (SIDE / 2); }
    DEV static u32 first_col() { return wave() / 2 * WAVE_COLS; }

    DEV void clear() {
        UNROLL for (u32 i = 0; i < DOWN; i++) {
            UNROLL for (u32 j = 0; j < ACROSS; j++) c[i][j] = Frag::zero();
        }
    }
    DEV void add(const Stage<SIDE>& stage) {
        UNROLL for (u32 k = 0; k < STEP; k += 16) {
            Frag::A a[DOWN];
            UNROLL for (u32 i = 0; i < DOWN; i++) a[i] = stage.x.a(first_row() + 16 * i, k);
            UNROLL for (u32 j = 0; j < ACROSS; j++) {
                const Frag::B b = stage.w.b(first_col() + 16 * j, k);
                UNROLL for (u32 i = 0; i < DOWN; i++) c[i][j] = Frag::mma(a[i], b, c[i][j]);
            }
        }
    }
    DEV void put(const Out& out, u32 row, u32 col) const {
        UNROLL for (u32 i = 0; i < DOWN; i++) {
            UNROLL for (u32 j = 0; j < ACROSS; j++) {
                UNROLL for (u32 l = 0; l < Frag::C::SIZE; l++) {
                    out.put(row + first_row() + 16 * i + Frag::C::row(l), col + first_col() + 16 * j + Frag::C::col(l), c[i][j].get(l));
                }
            }
        }
    }
};
#else
// A thread's results: rows thread / 16 + 16 i, outputs thread % 16 + 16 j.
template <u32 SIDE> struct Sums {
    static constexpr u32 EACH = SIDE / 16;
    f32 c[EACH][EACH];

    DEV void clear() {
        UNROLL for (u32 i = 0; i < EACH; i++) {
            UNROLL for (u32 j = 0; j < EACH; j++) c[i][j] = 0.0f;
        }
    }
    DEV void add(const Stage<SIDE>& stage) {
        for (u32 k = 0; k < STEP; k += 2) {
            f32x2 x[EACH], w[EACH];
            UNROLL for (u32 i = 0; i < EACH; i++) {
                x[i] = stage.x.pair(thread_id() / 16 + 16 * i, k);
                w[i] = stage.w.pair(thread_id() % 16 + 16 * i, k);
            }
            UNROLL for (u32 i = 0; i < EACH; i++) {
                UNROLL for (u32 j = 0; j < EACH; j++) c[i][j] = fma_f32(x[i].y, w[j].y, fma_f32(x[i].x, w[j].x, c[i][j]));
            }
        }
    }
    DEV void put(const Out& out, u32 row, u32 col) const {
        UNROLL for (u32 i = 0; i < EACH; i++) {
            UNROLL for (u32 j = 0; j < EACH; j++) out.put(row + thread_id() / 16 + 16 * i, col + thread_id() % 16 + 16 * j, c[i][j]);
        }
    }
};
#endif

// The sums of a block's tile. The next step's loads run while the current step is multiplied.
template <u32 SIDE, class Steps> DEV void multiply(Stages<SIDE>& stages, Steps xs, Steps ws, u32 steps, Sums<SIDE>& sums) {
    Parts<SIDE> x = xs.next(), w = ws.next();
    ROLLED for (u32 s = 0; s < steps; s++) {
        Stage<SIDE>& stage = stages[s % 2];
        x.store(stage.x);
        w.store(stage.w);
        // Before this barrier all threads have read the other stage, which is written next.
        barrier_lds();
        if (s + 1 < steps) {
            x = xs.next();
            w = ws.next();
        }
        sums.add(stage);
    }
}

#if HAS_ASYNC_COPY
// The same with copies in flight to all stages but one.
template <u32 SIDE>
DEV void multiply(Stages<SIDE>& stages, WholeSteps<SIDE> xs, WholeSteps<SIDE> ws, u32 steps, Sums<SIDE>& sums) {
    constexpr u32 STAGES = Values<SIDE>::STAGES;
    u32 asked = 0;
    const auto ask = [&] {
        if (asked < steps) {
            Stage<SIDE>& stage = stages[asked % STAGES];
            xs.copy_next(stage.x);
            ws.copy_next(stage.w);
        }
        asked++;
        // Also ends an empty group: each turn waits for all groups but the last STAGES - 2.
        end_copies();
    };
    UNROLL for (u32 s = 0; s + 1 < STAGES; s++) ask();
    ROLLED for (u32 s = 0; s < steps; s++) {
        wait_copies<STAGES - 2>();
        // After this barrier this step's copies are complete, and all threads have read the stage that is written next.
        barrier_lds();
        ask();
        sums.add(stages[s % STAGES]);
    }
}
#endif

#define GEMM(SIDE)                                                                                                             \
    KERNEL(256, gemm_f16_##SIDE, const f16* w, u32 w_stride, u32 n, const f16* x, u32 x_stride, const f32* x_scale, u32 k,     \
           u32 rows, f32* out, u32 out_stride, const f32* bias, u32 add) {                                                     \
        LDS(stages, Stages<SIDE>);                                                                                             \
        const Operand xs = {x, rows, x_stride, k}, ws = {w, n, w_stride, k};                                                   \
        const u32 row = block_x() * SIDE, col = block_y() * SIDE, steps = ceil_div(k, STEP);                                   \
        wait_for_predecessor_alone();                                                                                          \
        Sums<SIDE> sums;                                                                                                       \
        sums.clear();                                                                                                          \
        if (k % STEP == 0 && x_stride % 8 == 0 && w_stride % 8 == 0) {                                                         \
            multiply<SIDE>(stages, WholeSteps<SIDE>(xs, row), WholeSteps<SIDE>(ws, col), steps, sums);                         \
        } else {                                                                                                               \
            multiply<SIDE>(stages, AnySteps<SIDE>(xs, row), AnySteps<SIDE>(ws, col), steps, sums);                             \
        }                                                                                                                      \
        sums.put({out, x_scale, bias, rows, n, out_stride, add}, row, col);                                                    \
    }
GEMM(64)
GEMM(128)
