// swiglu: y[m][n] = silu(gate[m][n] + gate_bias[n]) * (up[m][n] + up_bias[n]), silu(x) = x / (1 + e^-x)
//
// Shapes     gate, up: f32, row m at m * stride (both may lie in one buffer of [gate | up] rows); biases: f32[cols], or null
// Variants   swiglu_a8: A8 rows of `padded` values (a multiple of 32, >= cols); swiglu_f32: f32[M][cols];
//            swiglu_x16: f16[M][cols] and f32 row_scales[M] (common/activation.h says what these are)
// Launch     a8: grid = (ceil(padded / 1024), M); f32: grid = (ceil(cols / 1024), M); x16: grid = M. block = 256
// Alignment  16 bytes for all planes; a cols or stride that is no multiple of 4 is read value by value
// Overflow   e^-x past f32 makes the gate 0 as it should: x / inf. A NaN stays one
// Moves      8 * cols bytes in (x16 reads them twice, the second time from a cache), 1.2 to 4 * cols out per row
#include "prelude/prelude.h"
#include "common/activation.h"
#include "common/reduce.h"

namespace swiglu {

struct Row {
    const f32* gate;
    const f32* up;
    const f32* gate_bias;
    const f32* up_bias;
    u32 cols;
    bool wide;

    DEV Row(const f32* gates, const f32* ups, const f32* gate_biases, const f32* up_biases, u32 row, u32 stride, u32 width)
        : gate(gates + (u64)row * stride), up(ups + (u64)row * stride), gate_bias(gate_biases), up_bias(up_biases),
          cols(width), wide(rows_are_wide(gates, stride) && rows_are_wide(ups, width)) {
        wait_for_predecessor();
    }

    DEV Four at(u32 k) const {
        Four g = load_four(gate, k, cols, wide), u = load_four(up, k, cols, wide);
        UNROLL for (u32 i = 0; i < 4; i++) {
            if (gate_bias && k + i < cols) g.v[i] += gate_bias[k + i];
            if (up_bias && k + i < cols) u.v[i] += up_bias[k + i];
            u.v[i] *= silu_f32(g.v[i]);
        }
        return u;
    }
};

} // namespace swiglu

KERNEL(256, swiglu_a8, const f32* gate, const f32* up, const f32* gate_bias, const f32* up_bias, i8* codes, f32* scales,
       i16* sums, u32 stride, u32 cols, u32 padded) {
    swiglu::Row row(gate, up, gate_bias, up_bias, block_y(), stride, cols);
    u32 k = (block_x() * block_threads() + thread_id()) * 4;
    store_a8(a8_row(codes, scales, sums, block_y(), padded), k, padded, row.at(k));
}

KERNEL(256, swiglu_f32, const f32* gate, const f32* up, const f32* gate_bias, const f32* up_bias, f32* out, u32 stride,
       u32 cols) {
    swiglu::Row row(gate, up, gate_bias, up_bias, block_y(), stride, cols);
    u32 k = (block_x() * block_threads() + thread_id()) * 4;
    store_four(out + (u64)block_y() * cols, k, cols, rows_are_wide(out, cols), row.at(k));
}

KERNEL(256, swiglu_x16, const f32* gate, const f32* up, const f32* gate_bias, const f32* up_bias, f16* out, f32* row_scales,
       u32 stride, u32 cols) {
    LDS(room, u32[TEAMS_MAX]);
    swiglu::Row row(gate, up, gate_bias, up_bias, block_x(), stride, cols);
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
