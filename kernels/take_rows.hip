// take_rows: out[m] = x[rows[m]]
//
// Shapes     x: f32, row r at r * x_stride; rows: u32[M]; out: f32[M][cols], no part of x
// Launch     grid = (ceil(cols / 1024), M), block = 256
// Alignment  16 bytes for all planes. If cols or x_stride is not a multiple of 4, values are read and written one by one
// Sums in    no sums: values are copied
// Tolerance  0: equal values
// Reference  the rows themselves, picked in tests/kernels/rows.rs
// Moves      4 * cols bytes in, 4 * cols out per row; memory-bound
#include "prelude/prelude.h"
#include "common/activation.h"

KERNEL(256, take_rows, const f32* x, const u32* rows, f32* out, u32 x_stride, u32 cols) {
    wait_for_predecessor();
    u32 k = (block_x() * block_threads() + thread_id()) * 4;
    bool wide = rows_are_wide(x, x_stride) && rows_are_wide(out, cols);
    Four y = load_four(x + (u64)rows[block_y()] * x_stride, k, cols, wide);
    store_four(out + (u64)block_y() * cols, k, cols, wide, y);
}
