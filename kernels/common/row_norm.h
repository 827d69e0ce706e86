// A row that a block norms, for norm.hip and router.hip. The first has the contract.
#pragma once
#include "activation.h"
#include "reduce.h"

namespace row_norm {

// Fours of a row that a lane keeps in registers; values past them are read again.
constexpr u32 KEPT = 4;

// Arguments that all variants share.
struct Task {
    const f32* x;
    const f32* weight;
    const f32* bias;
    const u32* rows;
    f32 eps;
    u32 cols, x_stride, centre;
};

// Row m of the result, and its factor. `each` calls use(k, values) with the lane's k, in steps of 4 * threads of the block.
struct Row {
    const f32* x;
    const f32* weight;
    const f32* bias;
    u32 cols;
    bool wide;
    f32 mean, factor;
    Four kept[KEPT], gains[KEPT];

    DEV u32 step() const { return block_threads() * 4; }

    DEV Row(const Task& t, u32 m, f32* room) : weight(t.weight), bias(t.bias), cols(t.cols), mean(0.0f) {
        // Weights do not depend on the launch before.
        UNROLL for (u32 i = 0; i < KEPT; i++) gains[i] = gain(i * step() + thread_id() * 4);
        wait_for_predecessor();
        u32 row = t.rows ? t.rows[m] : m;
        x = t.x + (u64)row * t.x_stride;
        wide = rows_are_wide(t.x, t.x_stride) && rows_are_wide(t.weight, cols) && rows_are_wide(t.bias, cols);
        UNROLL for (u32 i = 0; i < KEPT; i++) kept[i] = load_four(x, i * step() + thread_id() * 4, cols, wide);
        if (t.centre) centre(room);
        f32 sum = 0.0f;
        UNROLL for (u32 i = 0; i < KEPT; i++) sum = add_squares(kept[i], sum);
        for (u32 k = KEPT * step() + thread_id() * 4; k < cols; k += step()) sum = add_squares(far(k), sum);
        factor = 1.0f / sqrt_f32(teams_sum(sum, room) / (f32)cols + t.eps);
    }

    // Subtracts the mean from all values.
    DEV void centre(f32* room) {
        f32 sum = 0.0f;
        UNROLL for (u32 i = 0; i < KEPT; i++) sum = add(kept[i], sum);
        for (u32 k = KEPT * step() + thread_id() * 4; k < cols; k += step()) sum = add(far(k), sum);
        mean = teams_sum(sum, room) / (f32)cols;
        UNROLL for (u32 i = 0; i < KEPT; i++) take_mean(kept[i], i * step() + thread_id() * 4);
        // All threads have read the room.
        barrier_lds();
    }

    // Values past the row's end stay 0.
    DEV void take_mean(Four& v, u32 k) const {
        UNROLL for (u32 i = 0; i < 4; i++) v.v[i] = k + i < cols ? v.v[i] - mean : v.v[i];
    }

    // Values that are not in registers.
    DEV Four far(u32 k) const {
        Four v = load_four(x, k, cols, wide);
        take_mean(v, k);
        return v;
    }

    DEV static f32 add(const Four& x, f32 sum) {
        UNROLL for (u32 i = 0; i < 4; i++) sum += x.v[i];
        return sum;
    }

    DEV static f32 add_squares(const Four& x, f32 sum) {
        UNROLL for (u32 i = 0; i < 4; i++) sum = fma_f32(x.v[i], x.v[i], sum);
        return sum;
    }

    DEV Four gain(u32 k) const { return load_four(weight, k, cols, rows_are_wide(weight, cols)); }

    DEV Four scaled(Four x, const Four& w, u32 k) const {
        UNROLL for (u32 i = 0; i < 4; i++) x.v[i] = x.v[i] * factor * w.v[i];
        if (bias) {
            Four b = load_four(bias, k, cols, wide);
            UNROLL for (u32 i = 0; i < 4; i++) x.v[i] += b.v[i];
        }
        return x;
    }

    template <class Use> DEV void each(u32 end, Use use) const {
        UNROLL for (u32 i = 0; i < KEPT; i++) {
            u32 start = i * step();
            if (start < end) use(start + thread_id() * 4, scaled(kept[i], gains[i], start + thread_id() * 4));
        }
        for (u32 start = KEPT * step(); start < end; start += step()) {
            u32 k = start + thread_id() * 4;
            use(k, scaled(far(k), gain(k), k));
        }
    }
};

} // namespace row_norm
