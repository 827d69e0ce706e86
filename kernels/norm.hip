// norm: y[m] = x[r] * weight / sqrt(mean(x[r]^2) + eps), r = rows[m], or m where rows is null
//
// Shapes     x: f32[*][cols]; weight: f32[cols]; rows: u32[M], or null
// Variants   norm_a8: A8 rows of `padded` values (a multiple of 32, >= cols); norm_f32: f32[M][cols];
//            norm_x16: f16[M][cols] and f32 row_scales[M] (common/activation.h says what these are)
// Launch     grid = M, block = 256, or another multiple of 64 up to 1024 that is the same for every M
// Alignment  16 bytes for all planes; a cols that is no multiple of 4 is read value by value
// Sums in    f32: a lane's values in rising order, 32 lanes as a tree, then these in order. A row's bits depend on the row
//            and the block's size alone, not on M and not on the wave size
// Moves      8 * cols bytes in, 1.2 to 4 * cols out per row; at one row bound by latency
#include "prelude/prelude.h"
#include "common/activation.h"
#include "common/reduce.h"

namespace rms_norm {

// Fours of a row that a lane keeps in registers; what is past them is read again.
constexpr u32 KEPT = 4;

// A row and its factor. `each` calls use(k, values) with the lane's k, in steps of a block's 4 * threads.
struct Row {
    const f32* x;
    const f32* weight;
    u32 cols;
    bool wide;
    f32 factor;
    Four kept[KEPT];

    DEV u32 step() const { return block_threads() * 4; }

    DEV Row(const f32* values, const f32* weights, const u32* rows, f32 eps, u32 width, f32* room)
        : weight(weights), cols(width) {
        wait_for_predecessor();
        u32 row = rows ? rows[block_x()] : block_x();
        x = values + (u64)row * cols;
        wide = rows_are_wide(values, cols) && rows_are_wide(weights, cols);
        f32 sum = 0.0f;
        UNROLL for (u32 i = 0; i < KEPT; i++) kept[i] = load_four(x, i * step() + thread_id() * 4, cols, wide);
        UNROLL for (u32 i = 0; i < KEPT; i++) sum = add_squares(kept[i], sum);
        for (u32 k = KEPT * step() + thread_id() * 4; k < cols; k += step()) {
            sum = add_squares(load_four(x, k, cols, wide), sum);
        }
        factor = 1.0f / sqrt_f32(teams_sum(sum, room) / (f32)cols + eps);
    }

    DEV static f32 add_squares(const Four& x, f32 sum) {
        UNROLL for (u32 i = 0; i < 4; i++) sum = fma_f32(x.v[i], x.v[i], sum);
        return sum;
    }

    DEV Four scaled(Four x, u32 k) const {
        Four w = load_four(weight, k, cols, wide);
        UNROLL for (u32 i = 0; i < 4; i++) x.v[i] = x.v[i] * factor * w.v[i];
        return x;
    }

    template <class Use> DEV void each(u32 end, Use use) const {
        UNROLL for (u32 i = 0; i < KEPT; i++) {
            u32 start = i * step();
            if (start < end) use(start + thread_id() * 4, scaled(kept[i], start + thread_id() * 4));
        }
        for (u32 start = KEPT * step(); start < end; start += step()) {
            u32 k = start + thread_id() * 4;
            use(k, scaled(load_four(x, k, cols, wide), k));
        }
    }
};

} // namespace rms_norm

KERNEL(1024, norm_a8, const f32* x, const f32* weight, const u32* rows, i8* codes, f32* scales, i16* sums, f32 eps, u32 cols,
       u32 padded) {
    LDS(room, f32[TEAMS_MAX]);
    rms_norm::Row row(x, weight, rows, eps, cols, room);
    A8Row out = a8_row(codes, scales, sums, block_x(), padded);
    row.each(padded, [&](u32 k, const Four& y) { store_a8(out, k, padded, y); });
}

KERNEL(1024, norm_f32, const f32* x, const f32* weight, const u32* rows, f32* out, f32 eps, u32 cols) {
    LDS(room, f32[TEAMS_MAX]);
    rms_norm::Row row(x, weight, rows, eps, cols, room);
    f32* to = out + (u64)block_x() * cols;
    bool wide = rows_are_wide(out, cols);
    row.each(cols, [&](u32 k, const Four& y) { store_four(to, k, cols, wide, y); });
}

KERNEL(1024, norm_x16, const f32* x, const f32* weight, const u32* rows, f16* out, f32* row_scales, f32 eps, u32 cols) {
    LDS(room, f32[TEAMS_MAX]);
    LDS(most, u32[TEAMS_MAX]);
    rms_norm::Row row(x, weight, rows, eps, cols, room);
    u32 amax = 0;
    row.each(cols, [&](u32, const Four& y) { amax = max_u32(amax, magnitude(y)); });
    X16Scale scale = x16_scale(teams_max(amax, most));
    if (thread_id() == 0) row_scales[block_x()] = scale.scale;
    f16* to = out + (u64)block_x() * cols;
    bool wide = rows_are_wide(out, cols);
    row.each(cols, [&](u32 k, const Four& y) { store_x16(to, k, cols, wide, y, scale.factor); });
}
