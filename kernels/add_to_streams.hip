// add_to_streams: out[m][s] = out[m][s] + (1 + amounts[m][s]) * x[m], s from `first` on; amounts are 0 where they are null
//
// A row of out has streams of `cols` values, one after the other.
// Shapes     x: f32, row m at m * x_stride; amounts: f32, those of row m at m * amounts_stride, `streams` numbers, or null: not read
//            out: f32, row m at m * out_stride, changed in place; streams below `first` are not touched
// Launch     grid = (ceil(cols / 1024), M), block = 256
// Alignment  amounts: 4 bytes; x and out: 16 bytes. If cols or a stride is not a multiple of 4, values are read and written one
//            by one
// Sums in    f32: 1 + amount is rounded, then one fma
// Tolerance  0: the same bits
// Reference  f32 mul_add in tests/kernels/streams.rs
// Moves      4 * cols bytes in, and 4 * cols in and out for each stream that is changed, per row; memory-bound
#include "prelude/prelude.h"
#include "common/activation.h"

KERNEL(256, add_to_streams, const f32* x, const f32* amounts, f32* out, u32 first, u32 streams, u32 cols, u32 x_stride,
       u32 amounts_stride, u32 out_stride) {
    wait_for_predecessor();
    const u32 k = (block_x() * block_threads() + thread_id()) * 4;
    if (k >= cols) return;
    const bool wide = rows_are_wide(x, x_stride) && rows_are_wide(out, out_stride) && cols % 4 == 0;
    const Four v = load_four(x + (u64)block_y() * x_stride, k, cols, wide);
    f32* to = out + (u64)block_y() * out_stride;
    for (u32 s = first; s < streams; s++) {
        const f32 amount = amounts ? 1.0f + amounts[(u64)block_y() * amounts_stride + s] : 1.0f;
        Four y = load_four(to + s * cols, k, cols, wide);
        UNROLL for (u32 i = 0; i < 4; i++) y.v[i] = fma_f32(amount, v.v[i], y.v[i]);
        store_four(to + s * cols, k, cols, wide, y);
    }
}
