// Matrix times matrix for many rows: f16 in, f32 sums, on matrix units where there are some, else by fma.
//
// gemm_f16(w, w_stride, n, x, x_stride, x_scale, k, rows, out, out_stride, bias, add)
//     out[row][o] = x_scale[row] * sum over i < k of x[row][i] * w[o][i] (+ bias[o]) (+ out[row][o] where add is 1)
//     w: f16 [n][w_stride], x: f16 [rows][x_stride], at 16-byte aligned addresses; a stride that is no multiple of 8 is read
//     value by value, and what lies between k and the stride is not used. out: f32 [rows][out_stride]. bias 0: none.
// Blocks of 256 threads; block (x, y) computes rows 128 x .. and outputs 128 y ..: rows vary fastest, so that the blocks under
// way share few weights and find them in a cache.
//
// A result's sum runs over k in one order whatever the sizes are: steps of 32, within them as the matrix unit adds.
#include "prelude/prelude.h"

constexpr u32 TILE = 128, STEP = 32;
// 40 values, 80 bytes a row: eight rows' 16-byte parts lie in different banks.
constexpr u32 LD = STEP + 8;
constexpr u32 WAVES = 256 / WAVE;
// The block's waves stand in two rows of 64 tile rows each.
constexpr u32 WAVE_COLS = TILE / (WAVES / 2);

struct Operand {
    const f16* p;
    u32 rows, stride, k;
};

struct Stage {
    f16 x[TILE * LD], w[TILE * LD];
};

// A thread's 16-byte parts of a step of one operand: parts thread, thread + 256 of 128 rows x 4.
struct Parts {
    u32x4 v[2];
};

DEV u32 part_row(u32 i) { return (thread_id() + 256 * i) / 4; }
DEV u32 part_k() { return thread_id() % 4 * 8; }

// Whole steps of rows that begin at multiples of 16 bytes. Rows past the last read the last: their results are not stored.
struct WholeSteps {
    const f16* from[2];

    DEV WholeSteps(const Operand& m, u32 first_row) {
        UNROLL for (u32 i = 0; i < 2; i++) from[i] = m.p + u64(min_u32(first_row + part_row(i), m.rows - 1)) * m.stride + part_k();
    }
    // The parts of the next step. One past the end is never asked for.
    DEV Parts next() {
        Parts parts;
        UNROLL for (u32 i = 0; i < 2; i++) {
            parts.v[i] = load16(from[i]);
            from[i] += STEP;
        }
        return parts;
    }
};

// Any rows, any k: value by value, zeros past k.
struct AnySteps {
    const f16* from[2];
    u32 k, end;

    DEV AnySteps(const Operand& m, u32 first_row) : k(part_k()), end(m.k) {
        UNROLL for (u32 i = 0; i < 2; i++) from[i] = m.p + u64(min_u32(first_row + part_row(i), m.rows - 1)) * m.stride;
    }
    DEV Parts next() {
        u32 words[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        UNROLL for (u32 i = 0; i < 2; i++) {
            UNROLL for (u32 e = 0; e < 8; e++) {
                if (k + e < end) words[i][e / 2] |= u32(f16_bits(from[i][k + e])) << (16 * (e % 2));
            }
        }
        k += STEP;
        return {{{words[0][0], words[0][1], words[0][2], words[0][3]}, {words[1][0], words[1][1], words[1][2], words[1][3]}}};
    }
};

DEV void store_parts(f16* tile, const Parts& parts) {
    UNROLL for (u32 i = 0; i < 2; i++) store16(tile + part_row(i) * LD + part_k(), parts.v[i]);
}

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
// A wave's 64 x WAVE_COLS part of the tile.
struct Sums {
    static constexpr u32 DOWN = 64 / 16, ACROSS = WAVE_COLS / 16;
    Frag::C c[DOWN][ACROSS];

    DEV static u32 first_row() { return wave() % 2 * 64; }
    DEV static u32 first_col() { return wave() / 2 * WAVE_COLS; }

    DEV void clear() {
        UNROLL for (u32 i = 0; i < DOWN; i++) {
            UNROLL for (u32 j = 0; j < ACROSS; j++) c[i][j] = Frag::zero();
        }
    }
    DEV void add(const Stage& stage) {
        UNROLL for (u32 k = 0; k < STEP; k += 16) {
            Frag::A a[DOWN];
            UNROLL for (u32 i = 0; i < DOWN; i++) a[i] = Frag::load_a_lds(stage.x + (first_row() + 16 * i) * LD + k, LD);
            UNROLL for (u32 j = 0; j < ACROSS; j++) {
                const Frag::B b = Frag::load_bt_lds(stage.w + (first_col() + 16 * j) * LD + k, LD);
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
// A thread's 8 x 8 results: rows thread / 16 + 16 i, outputs thread % 16 + 16 j.
struct Sums {
    f32 c[8][8];

    DEV void clear() {
        UNROLL for (u32 i = 0; i < 8; i++) {
            UNROLL for (u32 j = 0; j < 8; j++) c[i][j] = 0.0f;
        }
    }
    DEV void add(const Stage& stage) {
        for (u32 k = 0; k < STEP; k += 2) {
            f32x2 x[8], w[8];
            UNROLL for (u32 i = 0; i < 8; i++) {
                x[i] = unpack_f16x2(load4(stage.x + (thread_id() / 16 + 16 * i) * LD + k));
                w[i] = unpack_f16x2(load4(stage.w + (thread_id() % 16 + 16 * i) * LD + k));
            }
            UNROLL for (u32 i = 0; i < 8; i++) {
                UNROLL for (u32 j = 0; j < 8; j++) c[i][j] = fma_f32(x[i].y, w[j].y, fma_f32(x[i].x, w[j].x, c[i][j]));
            }
        }
    }
    DEV void put(const Out& out, u32 row, u32 col) const {
        UNROLL for (u32 i = 0; i < 8; i++) {
            UNROLL for (u32 j = 0; j < 8; j++) out.put(row + thread_id() / 16 + 16 * i, col + thread_id() % 16 + 16 * j, c[i][j]);
        }
    }
};
#endif

// The sums of a block's tile. The next step's loads run while one is multiplied.
template <class Steps> DEV void multiply(Stage (&stages)[2], Steps xs, Steps ws, u32 steps, Sums& sums) {
    Parts x = xs.next(), w = ws.next();
    ROLLED for (u32 s = 0; s < steps; s++) {
        Stage& stage = stages[s % 2];
        store_parts(stage.x, x);
        store_parts(stage.w, w);
        // All have read the other stage, which is written next, before they came here.
        barrier_lds();
        if (s + 1 < steps) {
            x = xs.next();
            w = ws.next();
        }
        sums.add(stage);
    }
}

KERNEL(256, gemm_f16, const f16* w, u32 w_stride, u32 n, const f16* x, u32 x_stride, const f32* x_scale, u32 k, u32 rows, f32* out,
       u32 out_stride, const f32* bias, u32 add) {
    LDS(stages, Stage[2]);
    const Operand xs = {x, rows, x_stride, k}, ws = {w, n, w_stride, k};
    const u32 row = block_x() * TILE, col = block_y() * TILE, steps = ceil_div(k, STEP);
    wait_for_predecessor();
    Sums sums;
    sums.clear();
    if (k % STEP == 0 && x_stride % 8 == 0 && w_stride % 8 == 0) {
        multiply(stages, WholeSteps(xs, row), WholeSteps(ws, col), steps, sums);
    } else {
        multiply(stages, AnySteps(xs, row), AnySteps(ws, col), steps, sums);
    }
    sums.put({out, x_scale, bias, rows, n, out_stride, add}, row, col);
}
