// convolve: out[r][c] = act(bias[c] + sum over j of weight[c][j] * x[r - (taps - 1) + j][c])
//
// Rows before r are those of its sequence, also of earlier steps; before the first one all values are 0.
// Shapes     x: f32, row m at m * x_stride; out: f32, row m at m * out_stride; `width` values of each
//            weight: f32, that of value c at 4 * c, `taps` values; bias: f32[width], or null: 0
//            row_seq: u32[M], the sequence of each row, or NO_SEQUENCE (common/pages.h), whose results are 0
//            runs: the rows and arrays of each sequence (recurrent/runs.h). The state lies `state_offset` bytes from an array's
//            start: f32[taps - 1][width], the last rows of x, the oldest first
//            activation: by number, as common/activations.h says
// Variants   convolve_2, _3, _4: taps
// Requires   width and strides multiples of 4; before of one sequence is after of none
// Launch     grid = (ceil(width / 1024), ceil(rows / tile)), block = 256
// Alignment  16 bytes for all but row_seq
// Sums in    f32: the bias, then j rising. Neither `tile` nor the cut of a sequence into steps changes a bit
// Tolerance  |got - want| <= 1e-6 * size + 1e-30, size the sum of the terms' magnitudes; with SiLU, which changes by at most 1.1
//            times the change of the sum, 4e-6 * size
// Reference  f64 in tests/kernels/recurrent/convolve.rs
// Moves      4 * width bytes in per row, (taps - 1) / tile of that again from a cache, 4 * width out; memory-bound
#include "prelude/prelude.h"
#include "common/activation.h"
#include "common/activations.h"
#include "common/pages.h"
#include "recurrent/runs.h"

namespace convolve {

struct Task {
    const f32* x;
    const u32* row_seq;
    const u32* runs;
    const f32* weight;
    const f32* bias;
    f32* out;
    u64 state_offset;
    u32 x_stride, out_stride, rows, tile, width, activation;

    DEV Four row(u32 r, u32 k) const { return load_four(x + (u64)r * x_stride, k, width, true); }
};

template <u32 TAPS> struct Column {
    const Task& task;
    u32 k;

    // Values k..k+4 of the sequence's row that is `back` rows before row r of the step.
    DEV Four earlier(const Run& run, u32 r, u32 back) const {
        const u32 inside = r - run.first;
        if (back <= inside) return task.row(r - back, k);
        if (run.before == 0) return {};
        return load_four(run.old_state(task.state_offset) + (u64)(TAPS - 1 - (back - inside)) * task.width, k, task.width, true);
    }

    DEV void compute(u32 first, u32 end) const {
        // The weights of value k + i are weights[i].
        Four weights[4], start = {};
        UNROLL for (u32 i = 0; i < 4; i++) weights[i] = load_four(task.weight + (u64)(k + i) * 4, 0, 4, true);
        if (task.bias) start = load_four(task.bias, k, task.width, true);
        wait_for_predecessor();
        u32 sequence = NO_SEQUENCE;
        Run run(task.runs, 0);
        // The last rows up to this one, which is the last of them.
        Four window[TAPS] = {}, next = task.row(first, k);
        u32 next_of = task.row_seq[first];
        for (u32 r = first; r < end; r++) {
            const Four now = next;
            const u32 of = next_of;
            // In flight while this row is computed.
            next = task.row(min_u32(r + 1, end - 1), k);
            next_of = task.row_seq[min_u32(r + 1, end - 1)];
            f32* to = task.out + (u64)r * task.out_stride;
            if (of == NO_SEQUENCE) {
                store_four(to, k, task.width, true, {});
                continue;
            }
            UNROLL for (u32 i = 1; i < TAPS; i++) window[i - 1] = window[i];
            if (of != sequence) {
                sequence = of;
                run = Run(task.runs, of);
                UNROLL for (u32 i = 0; i + 1 < TAPS; i++) window[i] = earlier(run, r, TAPS - 1 - i);
            }
            window[TAPS - 1] = now;
            Four sum = start;
            UNROLL for (u32 j = 0; j < TAPS; j++) {
                UNROLL for (u32 i = 0; i < 4; i++) sum.v[i] = fma_f32(weights[i].v[j], window[j].v[i], sum.v[i]);
            }
            UNROLL for (u32 i = 0; i < 4; i++) sum.v[i] = activated_by(sum.v[i], task.activation);
            store_four(to, k, task.width, true, sum);
            if (r + 1 == run.first + run.rows) keep(run, window);
        }
    }

    // The state after a sequence's last row.
    DEV void keep(const Run& run, const Four (&window)[TAPS]) const {
        f32* state = run.new_state(task.state_offset);
        UNROLL for (u32 i = 1; i < TAPS; i++) store_four(state + (u64)(i - 1) * task.width, k, task.width, true, window[i]);
    }
};

template <u32 TAPS> DEV void run(const Task& task) {
    const u32 k = (block_x() * block_threads() + thread_id()) * 4, first = block_y() * task.tile;
    if (k >= task.width || first >= task.rows) return;
    const Column<TAPS> column = {task, k};
    column.compute(first, min_u32(first + task.tile, task.rows));
}

} // namespace convolve

#define CONVOLVE(TAPS)                                                                                                         \
    KERNEL(256, convolve_##TAPS, const f32* x, const u32* row_seq, const u32* runs, const f32* weight, const f32* bias,       \
           f32* out, u64 state_offset, u32 x_stride, u32 out_stride, u32 rows, u32 tile, u32 width, u32 activation) {          \
        const convolve::Task task = {x,        row_seq,    runs, weight, bias,  out,       state_offset,                       \
                                     x_stride, out_stride, rows, tile,   width, activation};                                   \
        convolve::run<TAPS>(task);                                                                                             \
    }

CONVOLVE(2)
CONVOLVE(3)
CONVOLVE(4)
