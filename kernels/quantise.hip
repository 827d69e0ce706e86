// quantise: out[m] = x[m], rows of f32 in the form that a matmul takes
//
// For rows whose producer could not write that form itself.
// Shapes     x: f32, row m at m * stride
// Variants   quantise_a8: A8 rows of `padded` values (a multiple of 32, >= cols);
//            quantise_x16: f16 values, in tiles where `tiled` is 1, and f32 row_scales[M]. common/activation.h defines A8
//            and X16
// Launch     quantise_a8: grid = (ceil(padded / 1024), M); quantise_x16: grid = M, block = 64 to
//            1024; quantise_a8: block = 256
// Alignment  16 bytes for all planes. If cols or stride is not a multiple of 4, values are read one by one
// Sums in    i32 for the sums of A8 codes, which are exact; else no sums, f32
// Tolerance  quantise_a8: scale within 4e-6 of amax / 127, values within scale / 2 + 8e-6 * amax, sums exact
//            quantise_x16: the scale brings amax into [2^13, 2^14); |got - want| <= (2^-11 + 4e-6) * |want| + 2^-38 * amax
// Reference  x as f64 in tests/kernels/norm.rs; tests/kernels/forms.rs checks A8 and X16
// Moves      4 * cols bytes in (quantise_x16 reads them twice, the second time from a cache), 1.25 (a8) or 2 (x16) per
//            value out; memory-bound
#include "prelude/prelude.h"
#include "common/activation.h"
#include "common/reduce.h"

KERNEL(256, quantise_a8, const f32* x, i8* codes, f32* scales, i16* sums, u32 stride, u32 cols, u32 padded) {
    wait_for_predecessor();
    bool wide = rows_are_wide(x, stride) && cols % 4 == 0;
    u32 k = (block_x() * block_threads() + thread_id()) * 4;
    Four values = load_four(x + (u64)block_y() * stride, k, cols, wide);
    store_a8(a8_row(codes, scales, sums, block_y(), padded), k, padded, values);
}

KERNEL(1024, quantise_x16, const f32* x, f16* out, f32* row_scales, u32 stride, u32 cols, u32 tiled) {
    LDS(room, u32[TEAMS_MAX]);
    wait_for_predecessor();
    bool wide = rows_are_wide(x, stride) && cols % 4 == 0;
    const f32* row = x + (u64)block_x() * stride;
    u32 amax = 0, step = block_threads() * 4;
    for (u32 k = thread_id() * 4; k < cols; k += step) amax = max_u32(amax, magnitude(load_four(row, k, cols, wide)));
    X16Scale scale = x16_scale(teams_max(amax, room));
    if (thread_id() == 0) row_scales[block_x()] = scale.scale;
    const X16Row to(out, block_x(), cols, tiled);
    for (u32 k = thread_id() * 4; k < to.end(); k += step) to.store(k, load_four(row, k, cols, wide), scale.factor);
}
