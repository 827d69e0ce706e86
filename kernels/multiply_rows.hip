// multiply_rows: x[m] = x[m] * weight
//
// Shapes     weight: f32[cols]; x: f32, row m at m * stride, changed in place
// Launch     grid = (ceil(cols / 1024), M), block = 256
// Alignment  16 bytes for all planes. If cols or stride is not a multiple of 4, values are read and written one by one
// Sums in    no sums; f32, one rounding per value
// Tolerance  0: the same bits
// Reference  f32 product in tests/kernels/streams.rs
// Moves      8 * cols bytes in, 4 * cols out per row; memory-bound
#include "prelude/prelude.h"
#include "common/activation.h"

KERNEL(256, multiply_rows, const f32* weight, f32* x, u32 stride, u32 cols) {
    u32 k = (block_x() * block_threads() + thread_id()) * 4;
    // The weights do not depend on the launch before.
    const Four gain = load_four(weight, k, cols, rows_are_wide(weight, cols));
    wait_for_predecessor();
    bool wide = rows_are_wide(x, stride) && cols % 4 == 0;
    f32* row = x + (u64)block_y() * stride;
    Four y = load_four(row, k, cols, wide);
    UNROLL for (u32 i = 0; i < 4; i++) y.v[i] *= gain.v[i];
    store_four(row, k, cols, wide, y);
}
