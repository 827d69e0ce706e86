// gated: y[m][n] = act(gate[m][n]) * up[m][n], or act(gate[m][n]) where `up` is null
//
// Shapes     gate, up: f32, row m at m * stride (both may lie in one buffer of [gate | up] rows)
//            activation: 0 is SiLU, x / (1 + e^-x), 1 is GELU by tanh (`activated` in prelude/numbers.h)
// Variants   gated_a8: A8 rows of `padded` values (a multiple of 32, >= cols); gated_f32: f32[M][cols];
//            gated_x16: f16[M][cols] and f32 row_scales[M] (common/activation.h says what these are)
// Launch     a8: grid = (ceil(padded / 1024), M); f32: grid = (ceil(cols / 1024), M); x16: grid = M. block = 256
// Alignment  16 bytes for all planes; a cols or stride that is no multiple of 4 is read value by value
// Overflow   e^-x past f32 makes the gate 0 as it should: x / inf. A NaN stays one
// Moves      8 * cols bytes in (x16 reads them twice, the second time from a cache), 1.2 to 4 * cols out per row
#include "prelude/prelude.h"
#include "common/activation.h"
#include "common/reduce.h"

namespace gated {

struct Row {
    const f32* gate;
    const f32* up;
    u32 cols, activation;
    bool wide;

    DEV Row(const f32* gates, const f32* ups, u32 row, u32 stride, u32 width, u32 act)
        : gate(gates + (u64)row * stride), up(ups ? ups + (u64)row * stride : nullptr), cols(width), activation(act),
          wide(rows_are_wide(gates, stride) && rows_are_wide(ups, width)) {
        wait_for_predecessor();
    }

    DEV Four at(u32 k) const {
        Four y = load_four(gate, k, cols, wide), u = {{1.0f, 1.0f, 1.0f, 1.0f}};
        // Past the row's end gates are 0, and so are these.
        if (up) u = load_four(up, k, cols, wide);
        UNROLL for (u32 i = 0; i < 4; i++) y.v[i] = u.v[i] * activated(y.v[i], activation);
        return y;
    }
};

} // namespace gated

KERNEL(256, gated_a8, const f32* gate, const f32* up, i8* codes, f32* scales, i16* sums, u32 stride, u32 cols, u32 padded,
       u32 activation) {
    gated::Row row(gate, up, block_y(), stride, cols, activation);
    u32 k = (block_x() * block_threads() + thread_id()) * 4;
    store_a8(a8_row(codes, scales, sums, block_y(), padded), k, padded, row.at(k));
}

KERNEL(256, gated_f32, const f32* gate, const f32* up, f32* out, u32 stride, u32 cols, u32 activation) {
    gated::Row row(gate, up, block_y(), stride, cols, activation);
    u32 k = (block_x() * block_threads() + thread_id()) * 4;
    store_four(out + (u64)block_y() * cols, k, cols, rows_are_wide(out, cols), row.at(k));
}

KERNEL(256, gated_x16, const f32* gate, const f32* up, f16* out, f32* row_scales, u32 stride, u32 cols, u32 activation) {
    LDS(room, u32[TEAMS_MAX]);
    gated::Row row(gate, up, block_x(), stride, cols, activation);
    u32 amax = 0;
    for (u32 k = thread_id() * 4; k < cols; k += block_threads() * 4) amax = max_u32(amax, magnitude(row.at(k)));
    X16Scale scale = x16_scale(teams_max(amax, room));
    if (thread_id() == 0) row_scales[block_x()] = scale.scale;
    f16* to = out + (u64)block_x() * cols;
    bool wide = rows_are_wide(out, cols);
    for (u32 k = thread_id() * 4; k < cols; k += block_threads() * 4) {
        store_x16(to, k, cols, wide, row.at(k), scale.factor);
    }
}
