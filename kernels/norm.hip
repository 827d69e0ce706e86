// norm: y[m] = (x[r] - mean) * weight / sqrt(mean((x[r] - mean)^2) + eps) + bias, r = rows[m], or m where rows is null
//
// The mean is that of the row where `centre` is 1 (LayerNorm), and 0 where it is 0 (RMS norm).
// Shapes     x: f32[*][cols], norm_f32: row r at r * x_stride; weight: f32[cols]; bias: f32[cols], or null: nothing is added
//            rows: u32[M], or null
//            The result of norm_f32 may take the place of x, at its stride, where rows is null
// Variants   norm_a8: A8 rows of `padded` values (a multiple of 32, >= cols); norm_x16: f16 values, in tiles where `tiled`
//            is 1, and f32 row_scales[M];
//            Both write f32 rows too, row m at `also + m * also_stride`, where `also` is not null
//            norm_f32: f32, row m at m * out_stride; where `add` is 1, the result is added to the row of out
//            common/activation.h defines A8 and X16
// Launch     grid = M, block = 256, or another multiple of 64 up to 1024 that is the same for every M
// Alignment  16 bytes for all planes. If cols or a stride is not a multiple of 4, values are read and written one by one
// Sums in    f32: a lane's values in rising order, 32 lanes as a tree, then these as a tree; squares are summed after the mean
//            is known. A row's bits depend on the row and the block's size alone, not on M and not on the wave size
// Tolerance  norm_f32: |got - want| <= 4e-6 * |want| + s, s the sum of: 4e-6 * largest |bias|; where centre is 1, 1e-6 *
//            mean(|x|) * largest |weight| / sqrt(mean((x - mean)^2) + eps); where add is 1, 4e-5
//            norm_a8: scale within 4e-6 of amax / 127, values within scale / 2 + 8e-6 * amax, sums exact
//            norm_x16: the scale brings amax into [2^13, 2^14); |got - want| <= (2^-11 + 4e-6) * |want| + 2^-38 * amax
// Reference  f64 in tests/kernels/norm.rs (for A8 and X16 of a norm with a mean or bias: the result of norm_f32);
//            tests/kernels/forms.rs checks A8 and X16
// Moves      8 * cols bytes in, 1.25 (a8), 2 (x16) or 4 (f32) per value out, per row; bound by latency at one row
#include "prelude/prelude.h"
#include "common/row_norm.h"

namespace row_norm {

// The block's row of a second, f32 result; `p` may be null.
struct Floats {
    f32* p;
    u32 cols;
    bool wide;

    DEV Floats(f32* out, u32 stride, u32 width)
        : p(out ? out + (u64)block_x() * stride : nullptr), cols(width),
          wide(rows_are_wide(out, stride) && width % 4 == 0) {}

    DEV void store(u32 k, const Four& y) const {
        if (p) store_four(p, k, cols, wide, y);
    }
};

} // namespace row_norm

KERNEL(1024, norm_a8, const f32* x, const f32* weight, const f32* bias, const u32* rows, i8* codes, f32* scales, i16* sums,
       f32* also, f32 eps, u32 cols, u32 padded, u32 centre, u32 also_stride) {
    LDS(room, f32[TEAMS_MAX]);
    row_norm::Row row({x, weight, bias, rows, eps, cols, cols, centre}, block_x(), room);
    A8Row out = a8_row(codes, scales, sums, block_x(), padded);
    const row_norm::Floats floats(also, also_stride, cols);
    row.each(padded, [&](u32 k, const Four& y) {
        store_a8(out, k, padded, y);
        floats.store(k, y);
    });
}

KERNEL(1024, norm_f32, const f32* x, const f32* weight, const f32* bias, const u32* rows, f32* out, f32 eps, u32 cols,
       u32 x_stride, u32 out_stride, u32 centre, u32 add) {
    LDS(room, f32[TEAMS_MAX]);
    row_norm::Row row({x, weight, bias, rows, eps, cols, x_stride, centre}, block_x(), room);
    f32* to = out + (u64)block_x() * out_stride;
    bool wide = rows_are_wide(out, out_stride) && cols % 4 == 0;
    row.each(cols, [&](u32 k, Four y) {
        if (add) {
            Four before = load_four(to, k, cols, wide);
            UNROLL for (u32 i = 0; i < 4; i++) y.v[i] += before.v[i];
        }
        store_four(to, k, cols, wide, y);
    });
}

KERNEL(1024, norm_x16, const f32* x, const f32* weight, const f32* bias, const u32* rows, f16* out, f32* row_scales, f32* also,
       f32 eps, u32 cols, u32 centre, u32 tiled, u32 also_stride) {
    LDS(room, f32[TEAMS_MAX]);
    LDS(most, u32[TEAMS_MAX]);
    row_norm::Row row({x, weight, bias, rows, eps, cols, cols, centre}, block_x(), room);
    u32 amax = 0;
    row.each(cols, [&](u32, const Four& y) { amax = max_u32(amax, magnitude(y)); });
    X16Scale scale = x16_scale(teams_max(amax, most));
    if (thread_id() == 0) row_scales[block_x()] = scale.scale;
    const X16Row to(out, block_x(), cols, tiled);
    const row_norm::Floats floats(also, also_stride, cols);
    row.each(to.end(), [&](u32 k, const Four& y) {
        to.store(k, y, scale.factor);
        floats.store(k, y);
    });
}
