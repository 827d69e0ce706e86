// gated: y[m][n] = act(gate[m][n]) * up[m][n], or act(gate[m][n]) where `up` is null
//
// Shapes     gate, up: f32, row m at m * stride; both may lie in one buffer of [gate | up] rows
//            activation: by number, as common/activations.h says; 2 is clamped, for rows with an up:
//            g / (1 + e^-1.702g) * (1 + u), where g is at most 7 and u from -7 to 7
//            experts: u32[M], the expert of row m or NO_EXPERT (common/experts.h), or null; gate_factor, up_factor: f32, number e
//            multiplies gates and ups of expert e; gate_bias, up_bias: f32, row e at e * (cols rounded up to 4), added to the
//            products. Each may be null; none is read without experts
// Variants   gated_a8: A8 rows of `padded` values (a multiple of 32, >= cols); gated_f32: f32[M][cols];
//            gated_x16: f16 values, in tiles where `tiled` is 1, and f32 row_scales[M]. common/activation.h defines A8
//            and X16
// Launch     gated_a8: grid = (ceil(padded / 1024), M); gated_f32: grid = (ceil(cols / 1024), M); gated_x16: grid = M,
//            block = 64 to 1024; others: block = 256
// Alignment  16 bytes for all planes. If cols or stride is not a multiple of 4, values are read one by one
// Sums in    no sums; f32. Where e^-x overflows, the gate becomes 0, as it should: x / inf. A NaN stays NaN
// Tolerance  gated_f32: |got - want| <= 4e-6 * |want| + 1e-6 * largest |want| of the launch; for gates of 20 to the
//            largest f32, of either sign, with no up: 1e-5 * |want| + 1e-37
//            gated_a8: scale within 4e-6 of amax / 127, values within scale / 2 + 8e-6 * amax, sums exact
//            gated_x16: the scale brings amax into [2^13, 2^14); |got - want| <= (2^-11 + 4e-6) * |want| + 2^-38 * amax
// Reference  f64 in tests/kernels/gated.rs; tests/kernels/forms.rs checks A8 and X16
// Moves      8 * cols bytes in, 1.25 (a8), 2 (x16) or 4 (f32) per value out; memory-bound. gated_x16 reads columns from
//            16 * block on again, from a cache
#include "prelude/prelude.h"
#include "common/activation.h"
#include "common/activations.h"
#include "common/experts.h"
#include "common/reduce.h"

namespace gated {

constexpr u32 CLAMPED = 2;
constexpr f32 LIMIT = 7.0f;

// A gate and its up, each clamped. Comparisons keep a NaN.
DEV f32 clamped(f32 gate, f32 up) {
    const f32 g = gate > LIMIT ? LIMIT : gate, u = up > LIMIT ? LIMIT : up < -LIMIT ? -LIMIT : up;
    return g / (1.0f + exp_f32(-1.702f * g)) * (1.0f + u);
}

// Factors and biases of all experts' gates and ups, and the expert of each row.
struct Terms {
    const u32* experts;
    const f32* gate_factor;
    const f32* up_factor;
    const f32* gate_bias;
    const f32* up_bias;
};

struct Row {
    const f32* gate;
    const f32* up;
    const f32* gate_bias;
    const f32* up_bias;
    f32 gate_factor, up_factor;
    u32 cols, activation;
    bool wide;

    DEV Row(const f32* gates, const f32* ups, const Terms& terms, u32 row, u32 stride, u32 width, u32 act)
        : gate(gates + (u64)row * stride), up(ups ? ups + (u64)row * stride : nullptr), gate_bias(nullptr), up_bias(nullptr),
          gate_factor(1.0f), up_factor(1.0f), cols(width), activation(act),
          wide(rows_are_wide(gates, stride) && rows_are_wide(ups, width)) {
        wait_for_predecessor();
        const u32 expert = terms.experts ? terms.experts[row] : NO_EXPERT;
        if (expert == NO_EXPERT) return;
        const u64 at = (u64)expert * (ceil_div(cols, 4) * 4);
        if (terms.gate_factor) gate_factor = terms.gate_factor[expert];
        if (terms.up_factor) up_factor = terms.up_factor[expert];
        if (terms.gate_bias) gate_bias = terms.gate_bias + at;
        if (terms.up_bias) up_bias = terms.up_bias + at;
    }

    DEV Four at(u32 k) const {
        Four y = load_four(gate, k, cols, wide), u;
        // Past the row's end results are 0, also where a gate of 0 is half open.
        UNROLL for (u32 i = 0; i < 4; i++) u.v[i] = k + i < cols ? 1.0f : 0.0f;
        if (up) u = load_four(up, k, cols, wide);
        // The sum with 0 makes no number another, but zeros past the row's end stay those without a sign.
        UNROLL for (u32 i = 0; i < 4; i++) {
            y.v[i] = fma_f32(y.v[i], gate_factor, 0.0f), u.v[i] = fma_f32(u.v[i], up_factor, 0.0f);
        }
        if (gate_bias) add(y, gate_bias, k);
        if (up_bias) add(u, up_bias, k);
        if (activation == CLAMPED) {
            UNROLL for (u32 i = 0; i < 4; i++) y.v[i] = clamped(y.v[i], u.v[i]);
            return y;
        }
        UNROLL for (u32 i = 0; i < 4; i++) y.v[i] = u.v[i] * activated_by(y.v[i], activation);
        return y;
    }

    DEV void add(Four& y, const f32* bias, u32 k) const {
        const Four more = load_four(bias, k, cols, wide);
        UNROLL for (u32 i = 0; i < 4; i++) y.v[i] += more.v[i];
    }
};

} // namespace gated

KERNEL(256, gated_a8, const f32* gate, const f32* up, const u32* experts, const f32* gate_factor, const f32* up_factor,
       const f32* gate_bias, const f32* up_bias, i8* codes, f32* scales, i16* sums, u32 stride, u32 cols, u32 padded,
       u32 activation) {
    gated::Row row(gate, up, {experts, gate_factor, up_factor, gate_bias, up_bias}, block_y(), stride, cols, activation);
    u32 k = (block_x() * block_threads() + thread_id()) * 4;
    store_a8(a8_row(codes, scales, sums, block_y(), padded), k, padded, row.at(k));
}

KERNEL(256, gated_f32, const f32* gate, const f32* up, const u32* experts, const f32* gate_factor, const f32* up_factor,
       const f32* gate_bias, const f32* up_bias, f32* out, u32 stride, u32 cols, u32 activation) {
    gated::Row row(gate, up, {experts, gate_factor, up_factor, gate_bias, up_bias}, block_y(), stride, cols, activation);
    u32 k = (block_x() * block_threads() + thread_id()) * 4;
    store_four(out + (u64)block_y() * cols, k, cols, rows_are_wide(out, cols), row.at(k));
}

KERNEL(1024, gated_x16, const f32* gate, const f32* up, const u32* experts, const f32* gate_factor, const f32* up_factor,
       const f32* gate_bias, const f32* up_bias, f16* out, f32* row_scales, u32 stride, u32 cols, u32 activation, u32 tiled) {
    // A lane keeps as many fours of a row in registers; values past them are computed again. All of their loads are in flight
    // together, which is most of the time: a row has one block.
    constexpr u32 KEPT = 4;
    LDS(room, u32[TEAMS_MAX]);
    gated::Row row(gate, up, {experts, gate_factor, up_factor, gate_bias, up_bias}, block_x(), stride, cols, activation);
    const u32 step = block_threads() * 4, first = thread_id() * 4;
    Four kept[KEPT];
    u32 amax = 0;
    UNROLL for (u32 i = 0; i < KEPT; i++) kept[i] = row.at(first + i * step);
    UNROLL for (u32 i = 0; i < KEPT; i++) amax = max_u32(amax, magnitude(kept[i]));
    for (u32 k = first + KEPT * step; k < cols; k += step) amax = max_u32(amax, magnitude(row.at(k)));
    X16Scale scale = x16_scale(teams_max(amax, room));
    if (thread_id() == 0) row_scales[block_x()] = scale.scale;
    const X16Row to(out, block_x(), cols, tiled);
    UNROLL for (u32 i = 0; i < KEPT; i++) to.store(first + i * step, kept[i], scale.factor);
    for (u32 k = first + KEPT * step; k < to.end(); k += step) to.store(k, row.at(k), scale.factor);
}
