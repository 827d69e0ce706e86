// selective_scan: S[h] = a S[h] + t x[h] b[g]^T, out[h] = S[h] c[g] + skip[h] x[h], row after row of each sequence
//
// The recurrence of Mamba 2: t = ln(1 + e^(steps[h] + step_bias[h])), a = e^(t * rate[h]). Head h has the group g of
// h / (heads / groups). S is 0 before the first row of a sequence.
// Shapes     x, b, c: f32, of row m at m * stride: heads * head_dim values of x, groups * columns values of b and of c
//            steps: f32, those of row m at m * steps_stride, one for each head; step_bias, rate, skip: f32, that of head h at
//            h * 1 or 4, as `bias_stride`, `rate_stride` and `skip_stride` say
//            out: f32, row m at m * out_stride, heads * head_dim values
//            runs: the rows and arrays of each sequence (recurrent/runs.h). S lies `state_offset` bytes from an array's
//            start: f32[heads][head_dim][columns]
// Variants   selective_scan_64, _128, _256: most columns
// Requires   heads a multiple of groups; columns at most as the variant; columns, head_dim and stride multiples of 4; before of
//            one sequence is after of none
// Launch     grid = (ceil(head_dim / (block / 4)), heads, sequences), block = 64, 128 or 256
// Alignment  16 bytes for x, runs and state_offset; 4 for all else
// Sums in    f32: 8 lanes in order of their columns, then a tree. A row's bits depend only on its sequence's rows up to it
// Tolerance  |got - want| <= 1e-5 * size + 1e-30, size the result for magnitudes of all terms
// Reference  f64 in tests/kernels/recurrent/scan.rs
// Moves      the state in and out once per sequence, 4 * (2 * columns / (head_dim / stripe) + 2 * head_dim) bytes per head and
//            row; bound by memory at one row of a sequence, by latency at many
#include "prelude/prelude.h"
#include "recurrent/rows.h"

namespace selective_scan {

struct Task {
    const f32* x;
    const f32* b;
    const f32* c;
    const f32* steps;
    f32* out;
    f32 step_bias, rate, skip;
    u32 stride, steps_stride, out_stride, head_dim, columns;
};

// A block's part of a head. It has rows of S for its outputs.
template <u32 MAX> struct Job {
    Task task;
    Staged<MAX>& staged;
    u32 head, first;
    f32 state[MAX / 32][4][PAIR];

    DEV u32 outputs() const { return task.head_dim - first; }
    DEV f32* out(u32 row) const { return task.out + (u64)row * task.out_stride + head * task.head_dim + first; }

    DEV Fetched<MAX> fetch(u32 row) const {
        Fetched<MAX> fetched;
        const u64 at = (u64)row * task.stride;
        fetched.numbers[0] = task.steps[(u64)row * task.steps_stride + head];
        fetched.begin(task.b + at, task.c + at, task.columns, task.x + at + head * task.head_dim + first,
                      min_u32(stripe(), outputs()));
        return fetched;
    }

    DEV void stage(u32 i, Fetched<MAX> fetched) {
        fetched.end(task.columns);
        const f32 t = softplus_f32(fetched.numbers[0] + task.step_bias);
        staged.put(i, fetched, 1.0f, 1.0f);
        staged.put_number(i, 0, t);
        staged.put_number(i, 1, exp_f32(t * task.rate));
    }

    DEV void step(u32 i, f32 (&results)[PAIR]) {
        const Share<MAX> b(staged.first[i]), c(staged.second[i]);
        const f32 t = staged.numbers[i][0], a = staged.numbers[i][1];
        UNROLL for (u32 p = 0; p < PAIR; p++) {
            const f32 x = staged.values[i][pair_at() + p], more = t * x;
            f32 sum = 0.0f;
            UNROLL for (u32 k = 0; k < MAX / 32; k++) {
                UNROLL for (u32 j = 0; j < 4; j++) {
                    f32& s = state[k][j][p];
                    s = fma_f32(b.v[k].v[j], more, a * s);
                    sum = fma_f32(s, c.v[k].v[j], sum);
                }
            }
            results[p] = fma_f32(task.skip, x, wave_sum<SHARERS>(sum));
        }
    }

    // Where the lane's row p of a head's S begins: the last row stands for what is past it.
    DEV u64 row_at(u32 p) const {
        return ((u64)head * task.head_dim + min_u32(first + pair_at() + p, task.head_dim - 1)) * task.columns;
    }
    DEV static u32 column_of(u32 k) { return 32 * k + 4 * sharer(); }

    // All loads are in flight together. Columns past the last have zeros in LDS, so their values may be any.
    DEV void load(const f32* s) {
        UNROLL for (u32 p = 0; p < PAIR; p++) {
            UNROLL for (u32 k = 0; k < MAX / 32; k++) {
                const Four four = begin_four(s + row_at(p), column_of(k), task.columns);
                UNROLL for (u32 j = 0; j < 4; j++) state[k][j][p] = four.v[j];
            }
        }
    }
    DEV void store(f32* s) const {
        UNROLL for (u32 p = 0; p < PAIR; p++) {
            const u32 values = first + pair_at() + p < task.head_dim ? task.columns : 0;
            UNROLL for (u32 k = 0; k < MAX / 32; k++) {
                const Four four = {{state[k][0][p], state[k][1][p], state[k][2][p], state[k][3][p]}};
                store_four(s + row_at(p), column_of(k), values, true, four);
            }
        }
    }
};

template <u32 MAX> DEV void run(const Task& task, const u32* runs, u64 state_offset) {
    const Run run(runs, block_z());
    if (run.rows == 0 || block_x() * stripe() >= task.head_dim) return;
    LDS(staged, Staged<MAX>);
    Job<MAX> job = {task, staged, block_y(), block_x() * stripe(), {}};
    if (run.after == 0) return clear_outputs(job.out(run.first), job.outputs());
    compute_rows<MAX>(job, run, state_offset);
}

} // namespace selective_scan

#define SELECTIVE_SCAN(MAX)                                                                                                    \
    KERNEL(256, selective_scan_##MAX, const f32* from, const f32* steps, const f32* step_bias, const f32* rate,               \
           const f32* skip, const u32* runs, f32* out, u64 state_offset, u32 stride, u32 steps_stride, u32 out_stride,         \
           u32 bias_stride, u32 rate_stride, u32 skip_stride, u32 heads, u32 groups, u32 head_dim, u32 columns) {              \
        const u32 head = block_y(), width = heads * head_dim, group = head / (heads / groups);                                 \
        const f32* b = from + width + group * columns;                                                                         \
        const f32* c = b + groups * columns;                                                                                   \
        const selective_scan::Task task = {from,                                                                               \
                                           b,                                                                                  \
                                           c,                                                                                  \
                                           steps,                                                                              \
                                           out,                                                                                \
                                           step_bias[head * bias_stride],                                                      \
                                           rate[head * rate_stride],                                                           \
                                           skip[head * skip_stride],                                                           \
                                           stride,                                                                             \
                                           steps_stride,                                                                       \
                                           out_stride,                                                                         \
                                           head_dim,                                                                           \
                                           columns};                                                                           \
        wait_for_predecessor();                                                                                                \
        selective_scan::run<MAX>(task, runs, state_offset);                                                                    \
    }

SELECTIVE_SCAN(64)
SELECTIVE_SCAN(128)
SELECTIVE_SCAN(256)
