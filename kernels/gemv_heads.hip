// gemv_heads: out[row][h] = W[h] (part of head h of x[row]), a matrix for each head
//
// Shapes     w: n rows of `cols` weights for each head, one head after the other, as one tensor (quant/planes.h)
//            x: f32, the part of head h of row m at m * x_stride + h * x_head, `cols` values
//            out: f32, that of head h of row m at m * out_stride + h * n
// Variants   gemv_heads_<type>_f32_<m>, type f32 f16 bf16 and all of quant/list.h; m: rows of a block, 1 or 4
// Requires   cols a multiple of the type's block; x_head a multiple of 4
// Launch     grid = (any width, ceil(rows / m), heads), block = 256. Block column x takes tiles x, x + grid x, ... of a head's
//            outputs: 16 of a float type, else 8
// Alignment  16 bytes for weights and x. If x_stride is not a multiple of 4, x is read value by value
// Sums in    f32, in the order of gemv/gemv.h for a head's matrix alone: the same bits as gemv_<type>_f32 gives for it
// Tolerance  |got - want| <= 2e-6 * size + 1e-30, size the sum of the terms' magnitudes
// Reference  f64 sums over ggml's values in tests/kernels/matmul/heads.rs
// Moves      every weight once per block row; bound by latency for short rows of a part, such as 128 values
#include "quant/list.h"
#include "gemv/gemv.h"
#include "quant/small.h"
#include "quant/small_floats.h"

namespace gemv_heads {

// A block's tiles of one head's outputs, as items of a stream.
template <class T, u32 R, u32 M> struct HeadJob {
    static constexpr u32 OUTPUTS = TEAMS * R;
    typename T::View view;
    u32 first_row, n, items, units, rows, out_stride;
    f32* base;
    f32* out;
    bool writes;

    DEV u32 first_of(u32 item) const { return (block_x() + item * grid_x()) * OUTPUTS + team() * R; }
    DEV Rows<T, R> rows_of(u32 item) const {
        Rows<T, R> w;
        UNROLL for (u32 r = 0; r < R; r++) w.row[r] = T::from(view, (first_row + min_u32(first_of(item) + r, n - 1)) * units);
        return w;
    }
    DEV void first_use() const { wait_for_predecessor(); }
    DEV void begin(u32 item) {
        const Place<R, M> at = place<R, M>();
        const u32 k = first_of(item) + at.r;
        writes = at.writes && k < n && at.m < rows;
        out = base + u64(at.m) * out_stride + k;
    }
    DEV void end(u32, const f32 (&sums)[R * M]) const {
        const f32 sum = team_sum<R * M>(sums);
        if (writes) *out = sum;
    }
};

template <class T, u32 R, u32 U, u32 M, u32 VALUES>
DEV void run(const u8* w, u32 n, u32 cols, const f32* x, u32 x_stride, u32 x_head, u32 rows, f32* out, u32 out_stride) {
    using Tile = F32Tile<VALUES, M>;
    const u32 head = block_z(), row = block_y() * M, tiles = ceil_div(n, TEAMS * R), units = units_of<T>(cols);
    if (block_x() >= tiles) return;
    LDS(tile, Tile);
    Activations<Tile> a = {{x + u64(head) * x_head, cols, x_stride}, row, min_u32(M, rows - row), units, false};
    HeadJob<T, R, M> job = {T::view(w, u64(grid_z()) * n * cols), head * n, n, ceil_div(tiles - block_x(), grid_x()), units,
                            a.rows, out_stride, out + u64(row) * out_stride + u64(head) * n, nullptr, false};
    stream<T, R, U, M, false>(tile, a, job);
}

} // namespace gemv_heads

#define GEMV_HEADS(NAME, T, R, U, M, VALUES)                                                                                   \
    KERNEL(256, gemv_heads_##NAME##_f32_##M, const u8* w, u32 n, u32 cols, const f32* x, u32 x_stride, u32 x_head, u32 rows,   \
           f32* out, u32 out_stride) {                                                                                         \
        gemv_heads::run<T, R, U, M, VALUES>(w, n, cols, x, x_stride, x_head, rows, out, out_stride);                           \
    }
#define GEMV_HEADS_QUANT(NAME, T)                                                                                              \
    GEMV_HEADS(NAME, T, 1, 1, 1, 32)                                                                                           \
    GEMV_HEADS(NAME, T, 1, 1, 4, 32)
#define GEMV_HEADS_FLOAT(NAME, T)                                                                                              \
    GEMV_HEADS(NAME, T, 2, 2, 1, T::values)                                                                                    \
    GEMV_HEADS(NAME, T, 2, 2, 4, T::values)

QUANT_TYPES(GEMV_HEADS_QUANT)
GEMV_HEADS_FLOAT(f32, F32)
GEMV_HEADS_FLOAT(f16, F16)
GEMV_HEADS_FLOAT(bf16, BF16)
