// cap_rows: x[m] = cap * tanh(x[m] / cap)
//
// Shapes     x: f32, row m at m * stride, changed in place
// Requires   cap finite and above 0
// Launch     grid = (ceil(cols / 1024), M), block = 256
// Alignment  16 bytes. If cols or stride is not a multiple of 4, values are read and written one by one
// Sums in    no sums; f32. Values far from 0 become cap or -cap; a NaN stays NaN
// Tolerance  |got - want| <= 2^-21 * cap
// Reference  f64 tanh in tests/kernels/rows.rs
// Moves      4 * cols bytes in, 4 * cols out per row; memory-bound
#include "prelude/prelude.h"
#include "common/activation.h"

KERNEL(256, cap_rows, f32* x, f32 cap, u32 stride, u32 cols) {
    wait_for_predecessor();
    u32 k = (block_x() * block_threads() + thread_id()) * 4;
    bool wide = rows_are_wide(x, stride) && cols % 4 == 0;
    f32* row = x + (u64)block_y() * stride;
    Four y = load_four(row, k, cols, wide);
    UNROLL for (u32 i = 0; i < 4; i++) y.v[i] = cap * tanh_f32(y.v[i] / cap);
    store_four(row, k, cols, wide, y);
}
