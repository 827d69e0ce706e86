// rescale_rows: x[m][g] = x[m][g] * r / sqrt(mean(x[m][g]^2) + eps), r = sqrt(mean(like[m]^2)), or 1 where like is null
//
// A row has groups g of neighbouring values, one after the other.
// Shapes     x: f32, group g of row m at m * stride + g * group, changed in place; like: f32, row m at m * like_stride,
//            `like_cols` values, or null: not read
// Requires   eps above 0; group and like_cols above 0
// Launch     grid = (groups, M), block = 256, or another multiple of 64 up to 1024 that is the same for every M
// Alignment  16 bytes for all planes. If group, like_cols or a stride is not a multiple of 4, values are read and written one by
//            one
// Sums in    f32: a lane's values in rising order, 32 lanes as a tree, then these as a tree. A group's bits depend on the group,
//            the row of like and the block's size alone, not on M and not on the wave size
// Tolerance  |got - want| <= 4e-6 * |want|
// Reference  f64 in tests/kernels/streams.rs
// Moves      8 * group bytes in, 4 * like_cols in where like is not null, 4 * group out per group; bound by latency at one row
#include "prelude/prelude.h"
#include "common/activation.h"
#include "common/reduce.h"

// The mean square of `cols` values; every lane of the block calls and gets it.
DEV f32 mean_square(const f32* x, u32 cols, bool wide, f32* room) {
    f32 sum = 0.0f;
    for (u32 k = thread_id() * 4; k < cols; k += block_threads() * 4) {
        const Four v = load_four(x, k, cols, wide);
        UNROLL for (u32 i = 0; i < 4; i++) sum = fma_f32(v.v[i], v.v[i], sum);
    }
    return teams_sum(sum, room) / (f32)cols;
}

KERNEL(1024, rescale_rows, f32* x, const f32* like, f32 eps, u32 group, u32 stride, u32 like_stride, u32 like_cols) {
    LDS(room, f32[TEAMS_MAX]);
    LDS(like_room, f32[TEAMS_MAX]);
    wait_for_predecessor();
    f32* values = x + (u64)block_y() * stride + block_x() * group;
    const bool wide = rows_are_wide(x, stride) && group % 4 == 0;
    f32 factor = 1.0f / sqrt_f32(mean_square(values, group, wide, room) + eps);
    if (like) {
        const bool like_wide = rows_are_wide(like, like_stride) && like_cols % 4 == 0;
        const f32* row = like + (u64)block_y() * like_stride;
        factor *= sqrt_f32(mean_square(row, like_cols, like_wide, like_room));
    }
    for (u32 k = thread_id() * 4; k < group; k += block_threads() * 4) {
        Four v = load_four(values, k, group, wide);
        UNROLL for (u32 i = 0; i < 4; i++) v.v[i] *= factor;
        store_four(values, k, group, wide, v);
    }
}
