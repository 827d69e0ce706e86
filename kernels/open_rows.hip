// open_rows: x[m] = x[m] / (1 + e^-gate[m])
//
// Shapes     gate: f32, that of row m at m * gate_stride; x: f32, row m at m * stride, changed in place
// Launch     grid = (ceil(cols / 1024), M), block = 256
// Alignment  gate: 4 bytes; x: 16 bytes. If cols or stride is not a multiple of 4, values are read and written one by one
// Sums in    no sums; f32. A large gate leaves x, a small one makes it 0; a NaN makes the row NaN
// Tolerance  |got / want - 1| <= 2^-20; 2^-17 where gate is below -10
// Reference  f64 exponential in tests/kernels/rows.rs
// Moves      4 * cols + 4 bytes in, 4 * cols out per row; memory-bound
#include "prelude/prelude.h"
#include "common/activation.h"

KERNEL(256, open_rows, const f32* gate, f32* x, u32 gate_stride, u32 stride, u32 cols) {
    wait_for_predecessor();
    u32 k = (block_x() * block_threads() + thread_id()) * 4;
    bool wide = rows_are_wide(x, stride) && cols % 4 == 0;
    f32* row = x + (u64)block_y() * stride;
    const f32 open = sigmoid_f32(gate[(u64)block_y() * gate_stride]);
    Four y = load_four(row, k, cols, wide);
    UNROLL for (u32 i = 0; i < 4; i++) y.v[i] *= open;
    store_four(row, k, cols, wide, y);
}
