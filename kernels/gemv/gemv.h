// gemv: out[row] = W x[row] (+ bias), one weight type, all rows of a block in one pass over W
//
// GEMV_QUANT(t, T) and GEMV_FLOAT(t, T) make the entry points of weight type t. Weights are planar (quant/planes.h).
// GEMV_TWO_TYPES(t_u, T, U) makes those of two matrices of type t and a third one of type u.
// IN is (codes, scales, sums): A8 planes of rows of `cols` values; or (x, x_stride): f32.
// OUT is (out_codes, out_scales, out_sums, out): A8 planes of rows of n values; or, where `out` is not null, f32[rows][n].
// Shapes     gemv_t_a_m and gemv_t_u_a_m(w0, w1, w2, n0, n1, n2, bias0, bias1, bias2, cols, IN, rows, out, out_stride, add)
//            Up to three matrices that share an input: n_i rows at w_i, `cols` inputs (0 rows: no matrix). Outputs n over the
//            rows of w0, then w1, then w2 go to out[row * out_stride + n]. A null bias adds nothing; add 1: adds to out
//            gemv_gated_t_a_m(gate, up, n, gate_bias, up_bias, cols, IN, rows, activation, OUT)
//            act(gate x) * (up x), act by number as `activated` in prelude/numbers.h
//            gemv_experts_t_a(table, experts, n, cols, IN, slots, out, out_stride, chosen_before)
//            Block row y is pair y of a row and an expert. The matrix at table[experts[y]] times row y / slots goes to out[y *
//            out_stride ..]; nothing is written for NO_EXPERT (common/experts.h) or an address of 0; slots: pairs
//            that share an input row: experts per token, or 1 where each pair has its own. chosen_before 1: another launch
//            lies between the writer of `experts` and this one, so weights are asked for before that launch ends
//            gemv_experts_gated_t_a(gate_table, up_table, experts, n, cols, IN, slots, activation, OUT)
//            The same for gate and up; pair y goes to row y of OUT
// Variants   a: a8 or f32 (float types: f32 only). m: rows of a block, 1, 2, 4 or 8. A quantised type with f32 activations, a
//            checking mode: 1 and 4; gated 1 and 2
// Requires   cols a multiple of the type's block; A8 out: n a multiple of 32
// Launch     grid = (any width, ceil(rows / m)), for experts (any width, pairs), block = 256. Block column x takes tiles x,
//            x + grid x, ... of 16 outputs of one matrix, gated of 32. Two types: two columns at least
// Alignment  16 bytes for weights, A8 codes and x. If x_stride is not a multiple of 4, x is read value by value
// Sums in    f32, for A8 codes of exact i32 sums; a lane's units rising, then a fixed tree of 32 lanes (gemv/dots.h). A row's
//            bits do not depend on m, on the other rows or on grid
// Tolerance  gemv, experts: |got - want| <= 2e-6 * size + 1e-30, size the sum of the terms' magnitudes. With x before it was
//            quantised to A8: 1.2e-2 of the norm of all results; f32: 1e-6
//            gated: 2e-6 * (1.13 * size(gate) * |up| + |act(gate)| * size(up)) + (2e-6 + s * |e|) * |want| + 1e-30; e: power to
//            which the activation raises e; s = 1.2e-7 for SiLU, 6e-7 for GELU. A8 out: the bits of the f32 result quantised
// Reference  f64 sums over ggml's values in tests/kernels/matmul/gemv.rs and tests/kernels/matmul/gated.rs
// Moves      every weight once per block row: 8 to 34 bytes per 32 of a quantised type, 2 or 4 per value of a float type;
//            memory-bound
#pragma once
#include "../common/activation.h"
#include "../common/experts.h"
#include "dots.h"

template <class T> DEV u32 units_of(u32 cols) {
    if constexpr (IS_FLOAT<T>) return row_chunks<T>(cols);
    else return cols / 32;
}

// Each lane holds one of R x M sums. This says which: row r and activation row m of sum lane / (32 / (R * M)). The first lane
// that holds a sum writes it.
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
    f32* out; // result of its first row for the first activation row
};

template <class Tile> DEV Activations<Tile> activations(const typename Tile::In& in, u32 units, u32 row, u32 rows) {
    return {in, row, rows, units, false};
}

// Whether one row of 8-bit activations has more loads in flight than several rows have. On an H200, 8B Q4_K_M then writes 541 tokens/s
// instead of 488, and 1B 1,890 instead of 1,610. A unit of Q8_0 is two loads by itself. AMD's compiler waits for more loads one after
// another then.
template <class T, class Tile> constexpr bool LOADS_MORE = false;
template <class T> constexpr bool LOADS_MORE<T, A8Tile<1>> = LAUNCHES_OVERLAP && T::plane(0).bytes < 32 && !HAS_HIGH<T>;

// The same for gate and up. With these types it would take more than 64 registers, and so fewer than four blocks share a unit.
template <class T, class Tile> constexpr bool GATE_LOADS_MORE = LOADS_MORE<T, Tile>;
template <class Tile> constexpr bool GATE_LOADS_MORE<Q5_K, Tile> = false;
template <class Tile> constexpr bool GATE_LOADS_MORE<Q6_K, Tile> = false;

// Up to three matrices in tiles of TEAMS * R outputs, one after the other.
struct Matrices {
    Matrix m0, m1, m2;

    template <u32 OUTPUTS> DEV u32 tiles() const { return ceil_div(m0.n, OUTPUTS) + ceil_div(m1.n, OUTPUTS) + ceil_div(m2.n, OUTPUTS); }
    // The matrix of tile `t`; `t` becomes the tile's number within it. Field by field: a choice of structs would use memory.
    template <u32 OUTPUTS> DEV Matrix of_tile(u32& t) const {
        const u32 end0 = ceil_div(m0.n, OUTPUTS), end1 = end0 + ceil_div(m1.n, OUTPUTS);
        const bool in0 = t < end0, in1 = t < end1;
        t -= in0 ? 0 : in1 ? end0 : end1;
        return {in0 ? m0.w : in1 ? m1.w : m2.w, in0 ? m0.bias : in1 ? m1.bias : m2.bias, in0 ? m0.n : in1 ? m1.n : m2.n, m0.cols,
                in0 ? m0.out : in1 ? m1.out : m2.out};
    }
};

// Blocks that share some matrices, and the number of this one among them.
struct Share {
    u32 block, blocks;
};

// A block's tiles `block`, `block` + `blocks`, ... of its share as items of a stream.
template <class T, u32 R, u32 M> struct StoreJob {
    static constexpr u32 OUTPUTS = TEAMS * R;
    Matrices matrices;
    Share share;
    u32 items, units, row, rows, out_stride;
    bool add, waits;
    f32* out;
    f32 before;
    bool writes;

    DEV Rows<T, R> rows_of(u32 item) const {
        u32 t = share.block + item * share.blocks;
        const Matrix matrix = matrices.of_tile<OUTPUTS>(t);
        const u32 first = t * OUTPUTS + team() * R;
        const typename T::View view = T::view(matrix.w, u64(matrix.n) * matrix.cols);
        Rows<T, R> w;
        UNROLL for (u32 r = 0; r < R; r++) w.row[r] = T::from(view, min_u32(first + r, matrix.n - 1) * units);
        return w;
    }
    DEV void first_use() const {
        if (waits) wait_for_predecessor();
    }
    DEV void begin(u32 item) {
        // Blocks that waited alone: the next launch begins in the places of those that end.
        if (!waits && item + 1 == items) let_successor_start();
        const Place<R, M> at = place<R, M>();
        u32 t = share.block + item * share.blocks;
        const Matrix matrix = matrices.of_tile<OUTPUTS>(t);
        const u32 n = t * OUTPUTS + team() * R + at.r;
        writes = at.writes && n < matrix.n && at.m < rows;
        out = matrix.out + u64(row + at.m) * out_stride + n;
        before = 0.0f;
        // Loaded now, it has arrived by the end.
        if (writes && add) before = *out;
        if (writes && matrix.bias != nullptr) before += matrix.bias[n];
    }
    DEV void end(u32, const f32 (&sums)[R * M]) const {
        const f32 sum = team_sum<R * M>(sums);
        if (writes) *out = before + sum;
    }
};

template <class T, u32 R, u32 U, u32 M, bool AHEAD, class Tile>
DEV void store_tiles(const Matrices& matrices, Share share, Tile& tile, Activations<Tile> a, u32 out_stride, bool add, bool waits) {
    const u32 tiles = matrices.tiles<TEAMS * R>();
    if (share.block >= tiles) return;
    StoreJob<T, R, M> job = {matrices, share, ceil_div(tiles - share.block, share.blocks), a.units, a.row, a.rows, out_stride, add,
                             waits, nullptr, 0.0f, false};
    stream<T, R, U, M, AHEAD>(tile, a, job);
}

// Where a row loads more: a short row of weights is on its way as a whole before the launch before this one has ended; of a long
// one, a lane has twice as many units in flight.
template <class T, u32 R, u32 U, u32 M, class Tile>
DEV void store_rows(const Matrices& matrices, Share share, Tile& tile, const Activations<Tile>& a, u32 out_stride, bool add) {
    if constexpr (!LOADS_MORE<T, Tile>) {
        store_tiles<T, R, U, M, false>(matrices, share, tile, a, out_stride, add, true);
    } else if (a.units <= 2 * U * TEAM) {
        store_tiles<T, R, U, M, true>(matrices, share, tile, a, out_stride, add, true);
    } else {
        store_tiles<T, R, 2 * U, M, false>(matrices, share, tile, a, out_stride, add, true);
    }
}

template <class T, u32 R, u32 U, u32 M, class Tile>
DEV void gemv(const Matrices& matrices, const typename Tile::In& in, u32 rows, u32 out_stride, u32 add) {
    LDS(tile, Tile);
    const u32 row = block_y() * M;
    const Activations<Tile> a = activations<Tile>(in, units_of<T>(matrices.m0.cols), row, min_u32(M, rows - row));
    store_rows<T, R, U, M>(matrices, {block_x(), grid_x()}, tile, a, out_stride, add != 0);
}

// The third matrix is of type Last. A block takes tiles of one type: where each takes one tile, as many blocks as there are tiles.
template <class T, class Last, u32 R, u32 U, u32 M, class Tile>
DEV void gemv_of_two(const Matrices& matrices, const typename Tile::In& in, u32 rows, u32 out_stride, u32 add) {
    LDS(tile, Tile);
    const Matrix none = {nullptr, nullptr, 0, matrices.m0.cols, nullptr};
    const Matrices first = {matrices.m0, matrices.m1, none}, last = {matrices.m2, none, none};
    const u32 of_first = first.tiles<TEAMS * R>(), of_last = last.tiles<TEAMS * R>(), row = block_y() * M;
    const u32 share = of_last == 0 ? grid_x() : u32(u64(grid_x()) * of_first / (of_first + of_last));
    const u32 blocks = max_u32(1, min_u32(share, grid_x() - 1));
    const u32 units = units_of<T>(matrices.m0.cols), some = min_u32(M, rows - row);
    const Activations<Tile> a = activations<Tile>(in, units, row, some);
    if (block_x() < blocks) {
        store_rows<T, R, U, M>(first, {block_x(), blocks}, tile, a, out_stride, add != 0);
    } else {
        store_rows<Last, R, U, M>(last, {block_x() - blocks, grid_x() - blocks}, tile, a, out_stride, add != 0);
    }
}

// `out` is the row of this pair; `in_row` is the row of its input. `waits`: the block has not waited for the launch before.
template <class T, u32 R, u32 U, class Tile>
DEV void gemv_expert(const u8* w, u32 n, u32 cols, const typename Tile::In& in, u32 in_row, f32* out, bool waits) {
    LDS(tile, Tile);
    const Matrix none = {nullptr, nullptr, 0, cols, nullptr};
    const Activations<Tile> a = activations<Tile>(in, units_of<T>(cols), in_row, 1);
    store_tiles<T, R, U, 1, false>({{w, nullptr, n, cols, out}, none, none}, {block_x(), grid_x()}, tile, a, 0, false, waits);
}

struct GateUp {
    const u8 *gate, *up;
    const f32 *gate_bias, *up_bias;
    u32 n, cols, activation;
};

struct GatedOut {
    A8Row a8; // row 0
    f32* out; // where not null, instead of a8
};

// Sums of a tile: M rows of 32 gate and 32 up outputs.
template <u32 M> using GateUpSums = f32[M][2][32];

// Eight lanes finish a row of a tile, four outputs each. The whole block calls.
template <u32 M> DEV void finish_gated(const GateUp& w, const GateUpSums<M>& sums, u32 tile_index, u32 rows, const GatedOut& out, u32 out_row) {
    const u32 m = thread_id() / 8, local = thread_id() % 8 * 4, n = tile_index * 32 + local;
    const bool mine = m < rows;
    Four value = {{0.0f, 0.0f, 0.0f, 0.0f}};
    UNROLL for (u32 i = 0; i < 4; i++) {
        if (!mine || n + i >= w.n) continue;
        f32 gate = sums[m][0][local + i], up = sums[m][1][local + i];
        if (w.gate_bias != nullptr) gate += w.gate_bias[n + i];
        if (w.up_bias != nullptr) up += w.up_bias[n + i];
        value.v[i] = activated(gate, w.activation) * up;
    }
    if (out.out == nullptr) {
        store_a8(a8_row(out.a8.codes, out.a8.scales, out.a8.sums, out_row + m, w.n), mine ? n : w.n, w.n, value);
    } else if (mine) {
        store_four(out.out + u64(out_row + m) * w.n, n, w.n, false, value);
    }
}

// A block's tiles of 32 outputs. A team computes P gate rows and their P up rows at a time, 4 / P times for a tile.
template <class T, u32 P, u32 M> struct GatedJob {
    static constexpr u32 PASSES = 4 / P;
    const GateUp& w;
    const GatedOut& out;
    GateUpSums<M>& sums;
    u32 items, units, rows, out_row;

    DEV u32 tile(u32 item) const { return block_x() + item / PASSES * grid_x(); }
    DEV static u32 in_tile(u32 item) { return team() * 4 + item % PASSES * P; }

    DEV Rows<T, 2 * P> rows_of(u32 item) const {
        const typename T::View gate = T::view(w.gate, u64(w.n) * w.cols), up = T::view(w.up, u64(w.n) * w.cols);
        const u32 first = tile(item) * 32 + in_tile(item);
        Rows<T, 2 * P> at;
        UNROLL for (u32 p = 0; p < P; p++) {
            const u32 begin = min_u32(first + p, w.n - 1) * units;
            at.row[p] = T::from(gate, begin);
            at.row[P + p] = T::from(up, begin);
        }
        return at;
    }
    // The next launch is as large. Blocks of it that begin before all of these have begun would slow them down.
    DEV void first_use() const { wait_for_predecessor_alone(); }
    DEV void begin(u32 item) const {
        if (item + 1 == items) let_successor_start();
    }
    DEV void end(u32 item, const f32 (&lane_sums)[2 * P * M]) const {
        const Place<2 * P, M> at = place<2 * P, M>();
        const f32 sum = team_sum<2 * P * M>(lane_sums);
        if (at.writes) sums[at.m][at.r / P][in_tile(item) + at.r % P] = sum;
        if (item % PASSES != PASSES - 1) return;
        barrier_lds();
        finish_gated<M>(w, sums, tile(item), rows, out, out_row);
        barrier_lds();
    }
};

template <class T, u32 P, u32 U, u32 M, class Tile>
DEV void gemv_gated(const GateUp& w, const typename Tile::In& in, u32 in_row, u32 rows, const GatedOut& out, u32 out_row) {
    const u32 tiles = ceil_div(w.n, 32);
    if (block_x() >= tiles) return;
    LDS(tile, Tile);
    LDS(sums, GateUpSums<M>);
    Activations<Tile> a = activations<Tile>(in, units_of<T>(w.cols), in_row, rows);
    GatedJob<T, P, M> job = {w, out, sums, ceil_div(tiles - block_x(), grid_x()) * (4 / P), a.units, rows, out_row};
    stream<T, 2 * P, U, M, GATE_LOADS_MORE<T, Tile>>(tile, a, job);
}

#define GEMV_A8_PARAMS const u8 *codes, const f32 *scales, const u32 *in_sums
#define GEMV_A8_INPUT A8In{codes, scales, in_sums}
#define GEMV_F32_PARAMS const f32 *x, u32 x_stride
#define GEMV_F32_INPUT F32In{x, cols, x_stride}
#define GEMV_OUT_PARAMS i8 *out_codes, f32 *out_scales, i16 *out_sums, f32 *out
#define GEMV_OUT GatedOut{{out_codes, out_scales, out_sums}, out}

// KIND: how many blocks must share a unit. Four of gate and up, so that all blocks of an 8B model run at once, and of experts' products,
// which have a thousand. Of other products, there are fewer, and registers for loads in flight count more.
#define KERNEL_FOUR_TIMES(THREADS, ...) KERNEL_TIMES(THREADS, 4, __VA_ARGS__)
// NAME: as in the contract. A team takes R weight rows at a time (gated: P of gate and P of up), U units of each in flight.
#define GEMV_STORE(KIND, NAME, T, R, U, M, TILE, INPUT, ...)                                                                   \
    KIND(256, gemv_##NAME, const u8* w0, const u8* w1, const u8* w2, u32 n0, u32 n1, u32 n2, const f32* bias0,                 \
           const f32* bias1, const f32* bias2, u32 cols, __VA_ARGS__, u32 rows, f32* out, u32 out_stride, u32 add) {           \
        gemv<T, R, U, M, TILE>({{w0, bias0, n0, cols, out}, {w1, bias1, n1, cols, out + n0},                                   \
                                {w2, bias2, n2, cols, out + n0 + n1}}, INPUT, rows, out_stride, add);                          \
    }
#define GEMV_GATED(KIND, NAME, T, P, U, M, TILE, INPUT, ...)                                                                   \
    KIND(256, gemv_gated_##NAME, const u8* gate, const u8* up, u32 n, const f32* gate_bias, const f32* up_bias, u32 cols,      \
           __VA_ARGS__, u32 rows, u32 activation, GEMV_OUT_PARAMS) {                                                           \
        const u32 row = block_y() * M;                                                                                         \
        gemv_gated<T, P, U, M, TILE>({gate, up, gate_bias, up_bias, n, cols, activation}, INPUT, row, min_u32(M, rows - row),  \
                                     GEMV_OUT, row);                                                                           \
    }
#define GEMV_EXPERTS(KIND, NAME, T, R, U, TILE, INPUT, ...)                                                                    \
    KIND(256, gemv_experts_##NAME, const u64* table, const u32* experts, u32 n, u32 cols, __VA_ARGS__, u32 slots, f32* out,    \
           u32 out_stride, u32 chosen_before) {                                                                                \
        const u32 pair = block_y();                                                                                            \
        if (chosen_before == 0) wait_for_predecessor_alone();                                                                  \
        const u32 expert = load_written_before(experts + pair);                                                                \
        if (expert == NO_EXPERT || table[expert] == 0) {                                                                       \
            if (chosen_before != 0) wait_for_predecessor_alone();                                                              \
            return;                                                                                                            \
        }                                                                                                                      \
        gemv_expert<T, R, U, TILE>(global_address<const u8>(table[expert]), n, cols, INPUT, pair / slots,                      \
                                   out + u64(pair) * out_stride, chosen_before != 0);                                          \
    }
#define GEMV_EXPERTS_GATED(NAME, T, P, U, TILE, INPUT, ...)                                                                    \
    KERNEL(256, gemv_experts_gated_##NAME, const u64* gate_table, const u64* up_table, const u32* experts, u32 n, u32 cols,    \
           __VA_ARGS__, u32 slots, u32 activation, GEMV_OUT_PARAMS) {                                                          \
        wait_for_predecessor_alone();                                                                                          \
        const u32 pair = block_y(), expert = experts[pair];                                                                    \
        if (expert == NO_EXPERT || gate_table[expert] == 0) return;                                                            \
        const u8 *gate = global_address<const u8>(gate_table[expert]), *up = global_address<const u8>(up_table[expert]);       \
        gemv_gated<T, P, U, 1, TILE>({gate, up, nullptr, nullptr, n, cols, activation}, INPUT, pair / slots, 1, GEMV_OUT, pair); \
    }

// A team's two weight rows share each read of activations from LDS; four rows would spill registers at 8 columns. Gate and up
// with f32 activations at 4 columns spill up to 23 registers on gfx906, so they stop at 2.
#define GEMV_QUANT_AS(KIND, GATED_KIND, NAME, T)                                                                                      \
    GEMV_STORE(KIND, NAME##_a8_1, T, 2, 1, 1, A8Tile<1>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                        \
    GEMV_STORE(KIND, NAME##_a8_2, T, 2, 1, 2, A8Tile<2>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                        \
    GEMV_STORE(KIND, NAME##_a8_4, T, 2, 1, 4, A8Tile<4>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                        \
    GEMV_STORE(KIND, NAME##_a8_8, T, 2, 1, 8, A8Tile<8>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                        \
    GEMV_STORE(KERNEL, NAME##_f32_1, T, 1, 1, 1, GEMV_TILE(32, 1), GEMV_F32_INPUT, GEMV_F32_PARAMS)                            \
    GEMV_STORE(KERNEL, NAME##_f32_4, T, 1, 1, 4, GEMV_TILE(32, 4), GEMV_F32_INPUT, GEMV_F32_PARAMS)                            \
    GEMV_GATED(GATED_KIND, NAME##_a8_1, T, 1, 1, 1, A8Tile<1>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                  \
    GEMV_GATED(GATED_KIND, NAME##_a8_2, T, 1, 1, 2, A8Tile<2>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                  \
    GEMV_GATED(GATED_KIND, NAME##_a8_4, T, 1, 1, 4, A8Tile<4>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                  \
    GEMV_GATED(KERNEL, NAME##_a8_8, T, 1, 1, 8, A8Tile<8>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                      \
    GEMV_GATED(KERNEL, NAME##_f32_1, T, 1, 1, 1, GEMV_TILE(32, 1), GEMV_F32_INPUT, GEMV_F32_PARAMS)                            \
    GEMV_GATED(KERNEL, NAME##_f32_2, T, 1, 1, 2, GEMV_TILE(32, 2), GEMV_F32_INPUT, GEMV_F32_PARAMS)                            \
    GEMV_EXPERTS(KERNEL_FOUR_TIMES, NAME##_a8, T, 2, 1, A8Tile<1>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                              \
    GEMV_EXPERTS(KERNEL, NAME##_f32, T, 1, 1, GEMV_TILE(32, 1), GEMV_F32_INPUT, GEMV_F32_PARAMS)                               \
    GEMV_EXPERTS_GATED(NAME##_a8, T, 1, 1, A8Tile<1>, GEMV_A8_INPUT, GEMV_A8_PARAMS)                                           \
    GEMV_EXPERTS_GATED(NAME##_f32, T, 1, 1, GEMV_TILE(32, 1), GEMV_F32_INPUT, GEMV_F32_PARAMS)

#define GEMV_QUANT(NAME, T) GEMV_QUANT_AS(KERNEL_TWICE, KERNEL_FOUR_TIMES, NAME, T)

#define GEMV_FLOAT_M(NAME, T, R, P, U, M)                                                                                      \
    GEMV_STORE(KERNEL, NAME##_f32_##M, T, R, U, M, GEMV_TILE(T::values, M), GEMV_F32_INPUT, GEMV_F32_PARAMS)                   \
    GEMV_GATED(KERNEL, NAME##_f32_##M, T, P, U, M, GEMV_TILE(T::values, M), GEMV_F32_INPUT, GEMV_F32_PARAMS)
#define GEMV_FLOAT(NAME, T)                                                                                                    \
    GEMV_FLOAT_M(NAME, T, 2, 1, 2, 1)                                                                                          \
    GEMV_FLOAT_M(NAME, T, 2, 1, 2, 2)                                                                                          \
    GEMV_FLOAT_M(NAME, T, 2, 1, 2, 4)                                                                                          \
    GEMV_FLOAT_M(NAME, T, 2, 1, 1, 8)                                                                                          \
    GEMV_EXPERTS(KERNEL, NAME##_f32, T, 2, 2, GEMV_TILE(T::values, 1), GEMV_F32_INPUT, GEMV_F32_PARAMS)                        \
    GEMV_EXPERTS_GATED(NAME##_f32, T, 1, 2, GEMV_TILE(T::values, 1), GEMV_F32_INPUT, GEMV_F32_PARAMS)
#define GEMV_TILE(VALUES, M) F32Tile<VALUES, M>

#define GEMV_TWO_TYPES_M(NAME, T, LAST, M)                                                                                     \
    KERNEL_TWICE(256, gemv_##NAME##_a8_##M, const u8* w0, const u8* w1, const u8* w2, u32 n0, u32 n1, u32 n2, const f32* bias0, \
           const f32* bias1, const f32* bias2, u32 cols, GEMV_A8_PARAMS, u32 rows, f32* out, u32 out_stride, u32 add) {        \
        gemv_of_two<T, LAST, 2, 1, M, A8Tile<M>>({{w0, bias0, n0, cols, out}, {w1, bias1, n1, cols, out + n0},                 \
                                                  {w2, bias2, n2, cols, out + n0 + n1}}, GEMV_A8_INPUT, rows, out_stride, add); \
    }
#define GEMV_TWO_TYPES(NAME, T, LAST)                                                                                          \
    GEMV_TWO_TYPES_M(NAME, T, LAST, 1)                                                                                         \
    GEMV_TWO_TYPES_M(NAME, T, LAST, 2)                                                                                         \
    GEMV_TWO_TYPES_M(NAME, T, LAST, 4)                                                                                         \
    GEMV_TWO_TYPES_M(NAME, T, LAST, 8)
