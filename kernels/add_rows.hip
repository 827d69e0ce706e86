// add_rows: out[m] = scale * x[m] + keep * out[m]
//
// Shapes     x: f32, row m at m * x_stride; out: f32, row m at m * out_stride; out may be x at the same stride
//            keep: 0 or 1; with 0, out is not read
// Launch     grid = (ceil(cols / 1024), M), block = 256
// Alignment  16 bytes for all planes. If cols or a stride is not a multiple of 4, values are read and written one by one
// Sums in    f32, one rounding per value: an fma, or a product where keep is 0
// Tolerance  0: the same bits
// Reference  f32 mul_add, or a product where keep is 0, in tests/kernels/rows.rs
// Moves      8 * cols bytes in if keep is 1, else 4 * cols; 4 * cols out per row; memory-bound
#include "prelude/prelude.h"
#include "common/activation.h"

KERNEL(256, add_rows, const f32* x, f32* out, f32 scale, u32 keep, u32 x_stride, u32 out_stride, u32 cols) {
    wait_for_predecessor();
    u32 k = (block_x() * block_threads() + thread_id()) * 4;
    bool wide = rows_are_wide(x, x_stride) && rows_are_wide(out, out_stride) && cols % 4 == 0;
    Four y = load_four(x + (u64)block_y() * x_stride, k, cols, wide);
    f32* to = out + (u64)block_y() * out_stride;
    if (keep) {
        Four before = load_four(to, k, cols, wide);
        UNROLL for (u32 i = 0; i < 4; i++) y.v[i] = fma_f32(scale, y.v[i], before.v[i]);
    } else {
        UNROLL for (u32 i = 0; i < 4; i++) y.v[i] *= scale;
    }
    store_four(to, k, cols, wide, y);
}
