// gemm: out[row][o] = x_scale[row] * sum over i < cols of x[row][i] * f16(w[o][i]) (+ bias[o]) (+ out[row][o] where add is 1)
//
// For more rows than gemv reads weights once for. Weights go from their planes to the matrix unit's operands in registers. They
// are never written to memory expanded. GEMM_QUANT(t, T) makes the entry points of weight type t, GEMM_WIDE_FLOAT those of F16 and BF16.
// gemm_experts multiplies the rows that chose an expert with its matrices, tile by tile of group_pairs.
// Shapes     gemm_t_x16_m(w0, w1, w2, n0, n1, n2, bias0, bias1, bias2, cols, x, x_stride, x_scale, rows, out, out_stride, add,
//            parts, counters)
//            Up to three matrices that share an input: n_i rows of planes at w_i (quant/planes.h), `cols` inputs (0 rows: no
//            matrix). Outputs over the rows of w0, then w1, then w2 go to out[row * out_stride + o]. A null bias adds nothing
//            x: f16[rows][x_stride]; x_scale: f32[rows]
//            parts: f32[blocks][m * 128], not read before it is written, and counters: u32[grid x * grid y], zeros before and
//            after; both unused, and may be null, where grid z is 1
//            gemm_experts_t_x16_m(table0, table1, tiles, members, n, cols, x, x_stride, x_scale, slots, out, out_stride)
//            tiles: u32[grid y][4] and members as group_pairs writes them for tiles of m. Pair p, of row p / slots of x and
//            an expert, gets the n outputs of the matrix at table0[expert], at out[p * out_stride ..]. Where table1 is not
//            null, n more follow, of the matrix at table1[expert]. A tile without members, or of an expert at address 0, writes
//            nothing
//            gemm_wide_t_x16_m and gemm_wide_experts_t_x16_m: the same without x_stride; x in tiles (common/tiled.h)
//            gemm_cluster_t_x16_m: as gemm_wide_t_x16_m, without parts and counters
// Variants   m: rows of a block, 16, 32 or 64. Only for targets with a matrix unit
//            gemm_wide: m is also 128 and, but for experts, 256. Only for targets with a wide matrix unit
//            gemm_cluster: m is 256. Only for targets with a wide matrix unit whose blocks copy for each other
// Requires   cols a multiple of the type's block; of F16 and BF16, of 8
// Launch     grid = (tiles of 128 outputs of one matrix, ceil(rows / m), splits), block = 256. Split z sums the z-th run of
//            ceil(steps / splits) steps of 128 inputs; the last block of a tile to end adds up its splits in order
//            gemm_experts: grid = (tiles of 128 outputs of both matrices, tiles of pairs), block = 256
//            gemm_wide: LDS of 4 steps of m rows, 3 where m is 256, and 1024 bytes
//            gemm_cluster: grid = (an even number of blocks, as many as run at a time), block = 384, LDS as gemm_wide. Pairs of
//            blocks take pairs of tiles in turn
// Alignment  16 bytes for planes and x; x_stride is a multiple of 8
// Sums in    f32: a split's steps in order, within a step as the matrix unit adds; then the splits in order. A row's bits
//            depend on the splits, but not on m, on the other rows or on the other grid dimensions
// Tolerance  |got - want| <= 2e-6 * sum of the terms' magnitudes + 1e-30; all variants give the same bits. Types with
//            blocks of 256 round scales and minimums to f16 too: + 2^-12 * sum of |x| * (3 |w| + 2 * m |dmin|), m 63, of Q2_K
//            15, and + 2^-25 * (largest code + 1) * sum of |x|
// Reference  f64 sums over ggml's values rounded to f16 in tests/kernels/matmul/gemm_quant.rs
// Moves      every weight once per block row, or tile of an expert, 8 to 64 bytes per 32; 256 * cols * m bytes of x per tile
//            from a cache; twice 512 * m bytes of parts per block where grid z is above 1; memory-bound for few rows, bound by
//            decoding up to some 100 and then by the matrix unit
#pragma once
#include "cluster.h"
#include "lanes.h"
#include "wide.h"

#if HAS_MATRIX_UNIT

// Unit: the matrix unit, Lanes or AcrossWaves.
template <class Unit, class T>
DEV void gemm(const Matrix& m0, const Matrix& m1, const Matrix& m2, u32 cols, const f16* x, u32 x_stride, const f32* x_scale,
              u32 rows, u32 out_stride, u32 add, const Splits<Unit::M>& splits) {
    // Rows vary fastest: blocks in flight share weights.
    const u32 block = block_y() * grid_x() + block_x(), first_row = block % grid_y() * Unit::M;
    const Tile tile(m0, m1, m2, block / grid_y());
    if (tile.first >= tile.matrix.n) return;
    const u32 steps = ceil_div(cols, STEP), each = ceil_div(steps, grid_z());
    const u32 begin = min_u32(block_z() * each, steps), end = min_u32(begin + each, steps);
    const Neighbours which = {first_row, rows - first_row};
    typename Unit::Sums sums;
    sums.clear();
    if (begin < end) {
        const typename Unit::template Weights<T> weights(tile.matrix.w, tile.matrix.n, tile.first, cols);
        Unit::template multiply<T>(x, x_stride, which, weights, begin, end, sums);
    } else {
        wait_for_predecessor_alone();
    }
    let_successor_start();
    const Tile to(m0, m1, m2, computed_again(block) / grid_y());
    const Out<Neighbours> out = {to.matrix.out, x_scale, to.matrix.bias, which, to.first, to.matrix.n, out_stride, add};
    if (grid_z() == 1) sums.put(out);
    else splits.join(sums, out);
}

template <class Unit, class T>
DEV void gemm_experts(const u64* table0, const u64* table1, const u32* tiles, const u32* members, u32 n, u32 cols, const f16* x,
                      u32 x_stride, const f32* x_scale, u32 slots, f32* out, u32 out_stride) {
    LDS(pairs, u32[Unit::M]);
    wait_for_predecessor_alone();
    const u32* tile = tiles + 4 * block_y();
    const u32 expert = tile[0], member = tile[1], count = tile[2];
    const u32 across = ceil_div(n, TILE), first = block_x() % across * TILE;
    const u64* table = block_x() < across ? table0 : table1;
    // Of a grid that is too wide; of no expert; of one that is not there.
    if (block_x() >= (table1 == nullptr ? across : 2 * across) || count == 0 || table[expert] == 0) return;
    if (thread_id() < Unit::M) pairs[thread_id()] = members[member + min_u32(thread_id(), count - 1)];
    barrier_lds();
    const Pairs which = {pairs, count, slots};
    typename Unit::Sums sums;
    sums.clear();
    const typename Unit::template Weights<T> weights(global_address<const u8>(table[expert]), n, first, cols);
    Unit::template multiply<T>(x, x_stride, which, weights, 0, ceil_div(cols, STEP), sums);
    let_successor_start();
    const Out<Pairs> to = {out + (table == table0 ? 0 : n), x_scale, nullptr, which, first, n, out_stride, 0};
    sums.put(to);
}

#define GEMM_LANES(NAME, T, M)                                                                                                 \
    KERNEL_TWICE(256, gemm_##NAME##_x16_##M, const u8* w0, const u8* w1, const u8* w2, u32 n0, u32 n1, u32 n2,                 \
                 const f32* bias0, const f32* bias1, const f32* bias2, u32 cols, const f16* x, u32 x_stride,                   \
                 const f32* x_scale, u32 rows, f32* out, u32 out_stride, u32 add, f32* parts, u32* counters) {                 \
        gemm<Lanes<M>, T>({w0, bias0, n0, out}, {w1, bias1, n1, out + n0}, {w2, bias2, n2, out + n0 + n1}, cols, x, x_stride,  \
                          x_scale, rows, out_stride, add, {parts, counters});                                                  \
    }                                                                                                                          \
    KERNEL_TWICE(256, gemm_experts_##NAME##_x16_##M, const u64* table0, const u64* table1, const u32* tiles,                   \
                 const u32* members, u32 n, u32 cols, const f16* x, u32 x_stride, const f32* x_scale, u32 slots, f32* out,     \
                 u32 out_stride) {                                                                                             \
        gemm_experts<Lanes<M>, T>(table0, table1, tiles, members, n, cols, x, x_stride, x_scale, slots, out, out_stride);      \
    }
#define GEMM_ACROSS(KERNEL_OF, NAME, T, M)                                                                                     \
    KERNEL_OF(256, gemm_wide_##NAME##_x16_##M, const u8* w0, const u8* w1, const u8* w2, u32 n0, u32 n1, u32 n2,               \
              const f32* bias0, const f32* bias1, const f32* bias2, u32 cols, const f16* x, const f32* x_scale, u32 rows,      \
              f32* out, u32 out_stride, u32 add, f32* parts, u32* counters) {                                                  \
        gemm<AcrossWaves<M>, T>({w0, bias0, n0, out}, {w1, bias1, n1, out + n0}, {w2, bias2, n2, out + n0 + n1}, cols, x, 0,   \
                                x_scale, rows, out_stride, add, {parts, counters});                                            \
    }
#if HAS_WIDE_MATRIX && HAS_BULK_COPY
#define GEMM_CLUSTER(NAME, T, M)                                                                                               \
    KERNEL_CLUSTER(CLUSTER_THREADS, gemm_cluster_##NAME##_x16_##M, const u8* w0, const u8* w1, const u8* w2, u32 n0, u32 n1,   \
                   u32 n2, const f32* bias0, const f32* bias1, const f32* bias2, u32 cols, const f16* x, const f32* x_scale,   \
                   u32 rows, f32* out, u32 out_stride, u32 add) {                                                              \
        gemm_cluster<T, M>({w0, bias0, n0, out}, {w1, bias1, n1, out + n0}, {w2, bias2, n2, out + n0 + n1}, cols, x, x_scale,  \
                           rows, out_stride, add);                                                                             \
    }
#else
#define GEMM_CLUSTER(NAME, T, M)
#endif
#define GEMM_ACROSS_EXPERTS(KERNEL_OF, NAME, T, M)                                                                             \
    KERNEL_OF(256, gemm_wide_experts_##NAME##_x16_##M, const u64* table0, const u64* table1, const u32* tiles,                 \
              const u32* members, u32 n, u32 cols, const f16* x, const f32* x_scale, u32 slots, f32* out, u32 out_stride) {    \
        gemm_experts<AcrossWaves<M>, T>(table0, table1, tiles, members, n, cols, x, 0, x_scale, slots, out, out_stride);       \
    }
#if HAS_WIDE_MATRIX
// Weights that need no decoding take so many registers that one block fills a unit.
#define GEMM_WIDE_FLOAT(NAME, T)                                                                                               \
    GEMM_ACROSS(KERNEL, NAME, T, 16)                                                                                           \
    GEMM_ACROSS(KERNEL, NAME, T, 32)                                                                                           \
    GEMM_ACROSS(KERNEL, NAME, T, 64)                                                                                           \
    GEMM_ACROSS(KERNEL, NAME, T, 128)                                                                                          \
    GEMM_ACROSS(KERNEL, NAME, T, 256)                                                                                          \
    GEMM_CLUSTER(NAME, T, 256)
#define GEMM_WIDE(NAME, T)                                                                                                     \
    GEMM_ACROSS(KERNEL_TWICE, NAME, T, 16)                                                                                     \
    GEMM_ACROSS(KERNEL_TWICE, NAME, T, 32)                                                                                     \
    GEMM_ACROSS(KERNEL_TWICE, NAME, T, 64)                                                                                     \
    GEMM_ACROSS(KERNEL, NAME, T, 128)                                                                                          \
    GEMM_ACROSS(KERNEL, NAME, T, 256)                                                                                          \
    GEMM_CLUSTER(NAME, T, 256)                                                                                                 \
    GEMM_ACROSS_EXPERTS(KERNEL_TWICE, NAME, T, 16)                                                                             \
    GEMM_ACROSS_EXPERTS(KERNEL_TWICE, NAME, T, 32)                                                                             \
    GEMM_ACROSS_EXPERTS(KERNEL_TWICE, NAME, T, 64)
#else
#define GEMM_WIDE_FLOAT(NAME, T)
#define GEMM_WIDE(NAME, T)
#endif
#define GEMM_QUANT(NAME, T)                                                                                                    \
    GEMM_LANES(NAME, T, 16)                                                                                                    \
    GEMM_LANES(NAME, T, 32)                                                                                                    \
    GEMM_LANES(NAME, T, 64)                                                                                                    \
    GEMM_WIDE(NAME, T)

#else
#define GEMM_QUANT(NAME, T)
#define GEMM_WIDE_FLOAT(NAME, T)
#endif
