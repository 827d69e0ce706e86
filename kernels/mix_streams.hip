// mix_streams: out[m][s] = x[m][s] + sum over i of amounts[m][s * streams + i] * x[m][i]
//
// A row has streams of `cols` values, one after the other.
// Shapes     amounts: f32, those of row m at m * amounts_stride, streams * streams numbers; x: f32, row m at m * x_stride
//            out: f32, row m at m * out_stride; not x
// Requires   streams above 0
// Launch     grid = (ceil(cols / 1024), M), block = 256
// Alignment  amounts: 4 bytes; x and out: 16 bytes. If cols or a stride is not a multiple of 4, values are read and written one
//            by one
// Sums in    f32, fma, i rising, then added to x. No bit depends on other rows
// Tolerance  |got - want| <= 1e-6 * (|x| + sum over i of |amounts * x|)
// Reference  f64 sums in tests/kernels/streams.rs
// Moves      4 * streams * cols bytes in, once per stream, all but the first from a cache; as many out per row; memory-bound
#include "prelude/prelude.h"
#include "common/activation.h"

KERNEL(256, mix_streams, const f32* amounts, const f32* x, f32* out, u32 streams, u32 cols, u32 amounts_stride, u32 x_stride,
       u32 out_stride) {
    wait_for_predecessor();
    const u32 k = (block_x() * block_threads() + thread_id()) * 4;
    if (k >= cols) return;
    const bool wide = rows_are_wide(x, x_stride) && rows_are_wide(out, out_stride) && cols % 4 == 0;
    const f32 *from = x + (u64)block_y() * x_stride, *amount = amounts + (u64)block_y() * amounts_stride;
    f32* to = out + (u64)block_y() * out_stride;
    for (u32 s = 0; s < streams; s++) {
        const Four own = load_four(from + s * cols, k, cols, wide);
        Four sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
        for (u32 i = 0; i < streams; i++) {
            const Four v = load_four(from + i * cols, k, cols, wide);
            const f32 part = amount[s * streams + i];
            UNROLL for (u32 j = 0; j < 4; j++) sum.v[j] = fma_f32(part, v.v[j], sum.v[j]);
        }
        UNROLL for (u32 j = 0; j < 4; j++) sum.v[j] += own.v[j];
        store_four(to + s * cols, k, cols, wide, sum);
    }
}
