// The matrix-vector kernels of one weight type: out = W x (+ bias) for up to M rows x in one pass over W.
//
// Entry points of type t, by GEMV_QUANT(t, T) or GEMV_FLOAT(t, T), blocks of 256 threads; a is a8 or f32 (float types: f32 only),
// m the rows of a block, 1, 2, 4 or 8 (a quantised type with f32 activations, a checking mode: 1 and 4). Block row y computes rows
// y * m .. y * m + m of `rows`; block column x takes tiles x, x + grid_x(), ..., so any width of the grid will do.
//
// gemv_t_a_m(w0, w1, w2, n0, n1, n2, bias0, bias1, bias2, cols, IN, rows, out, out_stride, add)
//     Up to three matrices that share an input, tiles of 16 outputs of one matrix: n_i rows at w_i, `cols` inputs (0 rows: no
//     matrix). out[row * out_stride + n] for n over the rows of w0, then w1, then w2. Bias 0: none. add 1: adds to what is there.
// gemv_swiglu_t_a_m(gate, up, n, gate_bias, up_bias, cols, IN, rows, OUT)
//     silu(gate x) * (up x), tiles of 32 outputs. OUT = (out_codes, out_scales, out_sums, out): A8 planes of rows of n values,
//     n a multiple of 32, or where `out` is not 0 f32 [rows][n] instead.
// gemv_experts_t_a(table, experts, n, cols, IN, slots, out, out_stride)
//     Block row y is pair y of a row and an expert: the matrix at table[experts[y]] times row y / slots, to out[y * out_stride ..].
//     slots is how many pairs share an input row: experts per token, or 1 where each pair has an input of its own.
// gemv_experts_swiglu_t_a(gate_table, up_table, experts, n, cols, IN, slots, OUT)
//     The same for gate and up; row y of OUT.
// IN = (codes, scales, sums): A8 planes of rows of `cols` values, or (x, x_stride): f32.
//
// Weights are planar (quant/planes.h).
#pragma once
#include "../common/activation.h"
#include "dots.h"

template <class T> DEV u32 units_of(u32 cols) {
    if constexpr (IS_FLOAT<T>) return row_chunks<T>(cols);
    else return cols / 32;
}

// Where a lane's one of R x M sums belongs: value lane / (32 / (R * M)), written by the first lane that holds it.
template <u32 R, u32 M> struct Place {
    u32 r, m;
    bool writes;
};
template <u32 R, u32 M> DEV Place<R, M> place() {
    constexpr u32 SHARE = TEAM / (R * M);
    const u32 value = member() / SHARE;
    return {value / M, value % M, member() % SHARE == 0};
}

struct Matrix {
    const u8* w;
    const f32* bias;
    u32 n, cols;
    f32* out; // of its first row, in the first activation row
};

// One tile of TEAMS * R outputs of a matrix.
template <class T, u32 R, u32 U, u32 M, class Tile>
DEV void store_tile(const Matrix& matrix, u32 tile_index, Tile& tile, Activations<Tile>& a, u32 out_stride, bool add, bool& waited) {
    const u32 row = tile_index * (TEAMS * R) + team() * R;
    Rows<T, 1, R> w;
    w.view[0] = T::view(matrix.w, u64(matrix.n) * matrix.cols);
    UNROLL for (u32 r = 0; r < R; r++) w.first[r] = min_u32(row + r, matrix.n - 1) * a.units;

    const Place<R, M> at = place<R, M>();
    const bool writes = at.writes && row + at.r < matrix.n && at.m < a.rows;
    f32* out = matrix.out + u64(a.row + at.m) * out_stride + (row + at.r);
    f32 acc[R * M], before = 0.0f;
    dots<T, 1, R, U, M>(w, tile, a, acc, [&] {
        if (!waited) wait_for_predecessor();
        waited = true;
        // Asked for now, it is here by the end.
        if (writes && add) before = *out;
        if (writes && matrix.bias != nullptr) before += matrix.bias[row + at.r];
    });
    const f32 sum = team_sum<R * M>(acc);
    if (writes) *out = before + sum;
}

template <class Tile> DEV Activations<Tile> activations(const typename Tile::In& in, u32 units, u32 row, u32 rows) {
    return {in, row, rows, units, false};
}

template <class T, u32 R, u32 U, u32 M, class Tile>
DEV void gemv(const Matrix& m0, const Matrix& m1, const Matrix& m2, const typename Tile::In& in, u32 rows, u32 out_stride, u32 add) {
    LDS(tile, Tile);
    const u32 row = block_y() * M;
    Activations<Tile> a = activations<Tile>(in, units_of<T>(m0.cols), row, min_u32(M, rows - row));
    const u32 end0 = ceil_div(m0.n, TEAMS * R), end1 = end0 + ceil_div(m1.n, TEAMS * R), end2 = end1 + ceil_div(m2.n, TEAMS * R);
    bool waited = false;
    for (u32 t = block_x(); t < end2; t += grid_x()) {
        const bool in0 = t < end0, in1 = t < end1;
        const Matrix matrix = {in0 ? m0.w : in1 ? m1.w : m2.w, in0 ? m0.bias : in1 ? m1.bias : m2.bias,
                               in0 ? m0.n : in1 ? m1.n : m2.n, m0.cols, in0 ? m0.out : in1 ? m1.out : m2.out};
        const u32 index = in0 ? t : in1 ? t - end0 : t - end1;
        store_tile<T, R, U, M>(matrix, index, tile, a, out_stride, add != 0, waited);
    }
}

struct GateUp {
    const u8 *gate, *up;
    const f32 *gate_bias, *up_bias;
    u32 n, cols;
};

struct SwigluOut {
    A8Row a8; // row 0
    f32* out; // instead, where not 0
};

// One tile of 32 outputs: each team computes two gate rows and their two up rows at a time, twice; then eight lanes finish a row,
// four outputs each.
template <class T, u32 U, u32 M, class Tile>
DEV void swiglu_tile(const GateUp& w, u32 tile_index, Tile& tile, Activations<Tile>& a, const SwigluOut& out, u32 out_row, bool& waited) {
    LDS(sums, f32[M][2][32]);
    Rows<T, 2, 4> rows;
    rows.view[0] = T::view(w.gate, u64(w.n) * w.cols);
    rows.view[1] = T::view(w.up, u64(w.n) * w.cols);
    const Place<4, M> at = place<4, M>();
    ROLLED for (u32 pass = 0; pass < 2; pass++) {
        const u32 local = team() * 4 + pass * 2;
        UNROLL for (u32 r = 0; r < 4; r++) rows.first[r] = min_u32(tile_index * 32 + local + r % 2, w.n - 1) * a.units;
        f32 acc[4 * M];
        dots<T, 2, 4, U, M>(rows, tile, a, acc, [&] {
            if (!waited) wait_for_predecessor();
            waited = true;
        });
        const f32 sum = team_sum<4 * M>(acc);
        if (at.writes) sums[at.m][at.r / 2][local + at.r % 2] = sum;
    }
    barrier_lds();
    const u32 m = thread_id() / 8, local = thread_id() % 8 * 4, n = tile_index * 32 + local;
    const bool mine = m < a.rows;
    Four value = {{0.0f, 0.0f, 0.0f, 0.0f}};
    UNROLL for (u32 i = 0; i < 4; i++) {
        if (!mine || n + i >= w.n) continue;
        f32 gate = sums[m][0][local + i], up = sums[m][1][local + i];
        if (w.gate_bias != nullptr) gate += w.gate_bias[n + i];
        if (w.up_bias != nullptr) up += w.up_bias[n + i];
        value.v[i] = silu_f32(gate) * up;
    }
    if (out.out == nullptr) {
        store_a8(a8_row(out.a8.codes, out.a8.scales, out.a8.sums, out_row + m, w.n), mine ? n : w.n, w.n, value);
    } else if (mine) {
        store_four(out.out + u64(out_row + m) * w.n, n, w.n, false, value);
    }
    barrier_lds();
}

template <class T, u32 U, u32 M, class Tile>
DEV void gemv_swiglu(const GateUp& w, const typename Tile::In& in, u32 in_row, u32 rows, const SwigluOut& out, u32 out_row) {
    LDS(tile, Tile);
    Activations<Tile> a = activations<Tile>(in, units_of<T>(w.cols), in_row, rows);
    bool waited = false;
    for (u32 t = block_x(); t < ceil_div(w.n, 32); t += grid_x()) swiglu_tile<T, U, M>(w, t, tile, a, out, out_row, waited);
}

#define GEMV_A8_PARAMS const u8 *codes, const f32 *scales, const u32 *in_sums
#define GEMV_A8_INPUT A8In{codes, scales, in_sums}
#define GEMV_F32_PARAMS const f32 *x, u32 x_stride
#define GEMV_F32_INPUT F32In{x, cols, x_stride}
#define GEMV_OUT_PARAMS i8 *out_codes, f32 *out_scales, i16 *out_sums, f32 *out
#define GEMV_OUT SwigluOut{{out_codes, out_scales, out_sums}, out}

// NAME: as in the list above. R rows a team and U units on their way per row.
#define GEMV_STORE(NAME, T, R, U, M, TILE, INPUT, ...)                                                                         \
    KERNEL(256, gemv_##NAME, const u8* w0, const u8* w1, const u8* w2, u32 n0, u32 n1, u32 n2, const f32* bias0,               \
           const f32* bias1, const f32* bias2, u32 cols, __VA_ARGS__, u32 rows, f32* out, u32 out_stride, u32 add) {           \
        gemv<T, R, U, M, TILE>({w0, bias0, n0, cols, out}, {w1, bias1, n1, cols, out + n0}, {w2, bias2, n2, cols, out + n0 + n1}, \
                               INPUT, rows, out_stride, add);                                                                  \
    }
#define GEMV_SWIGLU(NAME, T, U, M, TILE, INPUT, ...)                                                                           \
    KERNEL(256, gemv_swiglu_##NAME, const u8* gate, const u8* up, u32 n, const f32* gate_bias, const f32* up_bias, u32 cols,   \
           __VA_ARGS__, u32 rows, GEMV_OUT_PARAMS) {                                                                           \
        const u32 row = block_y() * M;                                                                                         \
        gemv_swiglu<T, U, M, TILE>({gate, up, gate_bias, up_bias, n, cols}, INPUT, row, min_u32(M, rows - row), GEMV_OUT, row);\
    }
#define GEMV_EXPERTS(NAME, T, R, U, TILE, INPUT, ...)                                                                          \
    KERNEL(256, gemv_experts_##NAME, const u64* table, const u32* experts, u32 n, u32 cols, __VA_ARGS__, u32 slots, f32* out,  \
           u32 out_stride) {                                                                                                   \
        wait_for_predecessor();                                                                                                \
        const u32 pair = block_y();                                                                                            \
        gemv_expert<T, R, U, TILE>(global_address<const u8>(table[experts[pair]]), n, cols, INPUT, pair / slots,                              \
                                   out + u64(pair) * out_stride);                                                              \
    }
#define GEMV_EXPERTS_SWIGLU(NAME, T, U, TILE, INPUT, ...)                                                                      \
    KERNEL(256, gemv_experts_swiglu_##NAME, const u64* gate_table, const u64* up_table, const u32* experts, u32 n, u32 cols,   \
           __VA_ARGS__, u32 slots, GEMV_OUT_PARAMS) {                                                                          \
        wait_for_predecessor();                                                                                                \
        const u32 pair = block_y(), expert = experts[pair];                                                                    \
        gemv_swiglu<T, U, 1, TILE>({global_address<const u8>(gate_table[expert]), global_address<const u8>(up_table[expert]), nullptr, nullptr, n, cols},    \
                                   INPUT, pair / slots, 1, GEMV_OUT, pair);                                                    \
    }

template <class T, u32 R, u32 U, class Tile>
DEV void gemv_expert(const u8* w, u32 n, u32 cols, const typename Tile::In& in, u32 in_row, f32* out) {
    LDS(tile, Tile);
    Activations<Tile> a = activations<Tile>(in, units_of<T>(cols), in_row, 1);
    // Its row of `out` is this block row's own: seen from there, the activation row is the first.
    const Matrix matrix = {w, nullptr, n, cols, out};
    bool waited = true;
    for (u32 t = block_x(); t < ceil_div(n, TEAMS * R); t += grid_x()) {
        store_tile<T, R, U, 1>(matrix, t, tile, a, 0, false, waited);
    }
}

#define GEMV_QUANT(NAME, T)                                                                                                    \
    GEMV_STORE(NAME##_a8_1, T, 2, 2, 1, A8Tile<1>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                              \
    GEMV_STORE(NAME##_a8_2, T, 2, 2, 2, A8Tile<2>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                              \
    GEMV_STORE(NAME##_a8_4, T, 2, 1, 4, A8Tile<4>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                              \
    GEMV_STORE(NAME##_a8_8, T, 2, 1, 8, A8Tile<8>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                              \
    GEMV_STORE(NAME##_f32_1, T, 1, 1, 1, GEMV_TILE(32, 1), GEMV_F32_INPUT, GEMV_F32_PARAMS)                                    \
    GEMV_STORE(NAME##_f32_4, T, 1, 1, 4, GEMV_TILE(32, 4), GEMV_F32_INPUT, GEMV_F32_PARAMS)                                    \
    GEMV_SWIGLU(NAME##_a8_1, T, 1, 1, A8Tile<1>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                                \
    GEMV_SWIGLU(NAME##_a8_2, T, 1, 2, A8Tile<2>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                                \
    GEMV_SWIGLU(NAME##_a8_4, T, 1, 4, A8Tile<4>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                                \
    GEMV_SWIGLU(NAME##_a8_8, T, 1, 8, A8Tile<8>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                                \
    GEMV_SWIGLU(NAME##_f32_1, T, 1, 1, GEMV_TILE(32, 1), GEMV_F32_INPUT, GEMV_F32_PARAMS)                                      \
    GEMV_SWIGLU(NAME##_f32_4, T, 1, 4, GEMV_TILE(32, 4), GEMV_F32_INPUT, GEMV_F32_PARAMS)                                      \
    GEMV_EXPERTS(NAME##_a8, T, 2, 2, A8Tile<1>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                                 \
    GEMV_EXPERTS(NAME##_f32, T, 1, 1, GEMV_TILE(32, 1), GEMV_F32_INPUT, GEMV_F32_PARAMS)                                       \
    GEMV_EXPERTS_SWIGLU(NAME##_a8, T, 1, A8Tile<1>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                             \
    GEMV_EXPERTS_SWIGLU(NAME##_f32, T, 1, GEMV_TILE(32, 1), GEMV_F32_INPUT, GEMV_F32_PARAMS)

#define GEMV_FLOAT_M(NAME, T, U, M)                                                                                            \
    GEMV_STORE(NAME##_f32_##M, T, 2, U, M, GEMV_TILE(T::values, M), GEMV_F32_INPUT, GEMV_F32_PARAMS)                           \
    GEMV_SWIGLU(NAME##_f32_##M, T, U, M, GEMV_TILE(T::values, M), GEMV_F32_INPUT, GEMV_F32_PARAMS)
#define GEMV_FLOAT(NAME, T)                                                                                                    \
    GEMV_FLOAT_M(NAME, T, 4, 1)                                                                                                \
    GEMV_FLOAT_M(NAME, T, 4, 2)                                                                                                \
    GEMV_FLOAT_M(NAME, T, 2, 4)                                                                                                \
    GEMV_FLOAT_M(NAME, T, 2, 8)                                                                                                \
    GEMV_EXPERTS(NAME##_f32, T, 2, 4, GEMV_TILE(T::values, 1), GEMV_F32_INPUT, GEMV_F32_PARAMS)                                \
    GEMV_EXPERTS_SWIGLU(NAME##_f32, T, 2, GEMV_TILE(T::values, 1), GEMV_F32_INPUT, GEMV_F32_PARAMS)
#define GEMV_TILE(VALUES, M) F32Tile<VALUES, M>
