// sparsify_rows: x[m] = max(0, x[m] - mean - deviations * deviation), mean and deviation those of the row's values
//
// The variance, the deviation's square, is the sum of squared differences from the mean divided by cols - 1.
// Shapes     x: f32, row m at m * stride, changed in place
// Requires   cols above 1
// Launch     grid = M, block = 256, or another multiple of 64 up to 1024 that is the same for every M
// Alignment  16 bytes. If cols or stride is not a multiple of 4, values are read and written one by one
// Sums in    f32: a lane's values in rising order, 32 lanes as a tree, then these as a tree; squares are summed after the mean
//            is known. A row's bits depend on the row and the block's size alone. A NaN makes the row NaN
// Tolerance  |got - want| <= 1e-6 * (|x| + |mean| + |deviations| * deviation)
// Reference  f64 in tests/kernels/streams.rs
// Moves      12 * cols bytes in, of which 8 come from a cache, 4 * cols out per row; bound by latency at one row
#include "prelude/prelude.h"
#include "common/activation.h"
#include "common/reduce.h"

KERNEL(1024, sparsify_rows, f32* x, f32 deviations, u32 stride, u32 cols) {
    LDS(room, f32[TEAMS_MAX]);
    LDS(squares_room, f32[TEAMS_MAX]);
    wait_for_predecessor();
    f32* row = x + (u64)block_x() * stride;
    const bool wide = rows_are_wide(x, stride) && cols % 4 == 0;
    const u32 step = block_threads() * 4;
    f32 sum = 0.0f, squares = 0.0f;
    for (u32 k = thread_id() * 4; k < cols; k += step) {
        const Four v = load_four(row, k, cols, wide);
        UNROLL for (u32 i = 0; i < 4; i++) sum += v.v[i];
    }
    const f32 mean = teams_sum(sum, room) / (f32)cols;
    for (u32 k = thread_id() * 4; k < cols; k += step) {
        const Four v = load_four(row, k, cols, wide);
        UNROLL for (u32 i = 0; i < 4; i++) {
            const f32 off = k + i < cols ? v.v[i] - mean : 0.0f;
            squares = fma_f32(off, off, squares);
        }
    }
    const f32 cut = mean + deviations * sqrt_f32(teams_sum(squares, squares_room) / (f32)(cols - 1));
    for (u32 k = thread_id() * 4; k < cols; k += step) {
        Four v = load_four(row, k, cols, wide);
        // In this order a NaN stays one.
        UNROLL for (u32 i = 0; i < 4; i++) v.v[i] = v.v[i] <= cut ? 0.0f : v.v[i] - cut;
        store_four(row, k, cols, wide, v);
    }
}
