// delta_rule: S[h] = g S[h] + k d^T, d = (v[h] - g S[h]^T k) / (1 + e^-amount[h]), out[h] = S[h]^T q, row after row
//
// The gated delta rule, over the rows of each sequence, with g = e^(rate[h] * ln(1 + e^(decay[h] + decay_bias[h]))).
// The key head of h has q and k, each x divided by sqrt(|x|^2 + eps); q is divided by sqrt(key_dim) too. S is 0 before the
// first row of a sequence.
// Shapes     from: f32, row m at m * stride: q of all key heads, k of all key heads, v of all value heads
//            decay, amount: f32, those of row m at m * decay_stride and m * amount_stride, one for each value head
//            decay_bias, rate: f32, that of head h at h * 1 or 4, as `bias_stride` and `rate_stride` say
//            out: f32, row m at m * out_stride, value_dim values of each value head
//            runs: the rows and arrays of each sequence (recurrent/runs.h). S lies `state_offset` bytes from an array's
//            start: f32[values][key_dim][value_dim]
//            keys, values: numbers of heads. Head h has key head h % keys where in_turn is 1, else h / (values / keys)
// Variants   delta_rule_64, _128, _256: most values of a key
// Requires   values a multiple of keys; key_dim at most as the variant; key_dim, value_dim and stride multiples of 4; before of one
//            sequence is after of none; eps above 0
// Launch     grid = (ceil(value_dim / (block / 4)), values, sequences), block = 64, 128 or 256
// Alignment  16 bytes for from, runs and state_offset; 4 for all else
// Sums in    f32: lengths and k q in a team; S^T k and S^T q by 8 lanes in order of their keys, then a tree. The result is
//            g S^T q + (k q) d of the S before, so that both sums are taken at once. A row's bits depend only on its
//            sequence's rows up to it
// Tolerance  |got - want| <= 2e-5 * size, results by 1 / sqrt(key_dim) less; size the largest length of a column of S so far,
//            and of its v
// Reference  f64 in tests/kernels/recurrent/delta.rs
// Moves      the state in and out once per sequence, 4 * (2 * key_dim / (value_dim / stripe) + 2 * value_dim) bytes per head
//            and row; bound by memory at one row of a sequence, by latency at many
#include "prelude/prelude.h"
#include "recurrent/rows.h"

namespace delta_rule {

struct Task {
    const f32* q;
    const f32* k;
    const f32* v;
    const f32* decay;
    const f32* amount;
    f32* out;
    f32 decay_bias, rate, eps;
    u32 stride, decay_stride, amount_stride, out_stride, key_dim, value_dim;
};

// A block's part of a head. It has columns of S for its outputs.
template <u32 MAX> struct Job {
    Task task;
    Staged<MAX>& staged;
    u32 head, first;
    f32 state[MAX / 32][4][PAIR];

    DEV u32 outputs() const { return task.value_dim - first; }
    DEV f32* out(u32 row) const { return task.out + (u64)row * task.out_stride + head * task.value_dim + first; }

    DEV Fetched<MAX> fetch(u32 row) const {
        Fetched<MAX> fetched;
        const u64 at = (u64)row * task.stride;
        fetched.numbers[0] = task.decay[(u64)row * task.decay_stride + head];
        fetched.numbers[1] = task.amount[(u64)row * task.amount_stride + head];
        fetched.begin(task.k + at, task.q + at, task.key_dim, task.v + at + head * task.value_dim + first,
                      min_u32(stripe(), outputs()));
        return fetched;
    }

    DEV void stage(u32 i, Fetched<MAX> fetched) {
        fetched.end(task.key_dim);
        f32 kk = 0.0f, qq = 0.0f, kq = 0.0f;
        UNROLL for (u32 n = 0; n < Fetched<MAX>::FOURS; n++) {
            UNROLL for (u32 j = 0; j < 4; j++) {
                const f32 k = fetched.first[n].v[j], q = fetched.second[n].v[j];
                kk = fma_f32(k, k, kk);
                qq = fma_f32(q, q, qq);
                kq = fma_f32(k, q, kq);
            }
        }
        const f32 of_k = 1.0f / sqrt_f32(team_sum(kk) + task.eps);
        const f32 of_q = 1.0f / sqrt_f32((team_sum(qq) + task.eps) * (f32)task.key_dim);
        staged.put(i, fetched, of_k, of_q);
        staged.put_number(i, 0, exp_f32(task.rate * softplus_f32(fetched.numbers[0] + task.decay_bias)));
        staged.put_number(i, 1, sigmoid_f32(fetched.numbers[1]));
        staged.put_number(i, 2, team_sum(kq) * of_k * of_q);
    }

    DEV void step(u32 i, f32 (&results)[PAIR]) {
        const Share<MAX> key(staged.first[i]), query(staged.second[i]);
        const f32 g = staged.numbers[i][0], amount = staged.numbers[i][1], kq = staged.numbers[i][2];
        f32 of_key[PAIR] = {}, of_query[PAIR] = {};
        UNROLL for (u32 n = 0; n < MAX / 32; n++) {
            UNROLL for (u32 j = 0; j < 4; j++) {
                UNROLL for (u32 p = 0; p < PAIR; p++) {
                    of_key[p] = fma_f32(state[n][j][p], key.v[n].v[j], of_key[p]);
                    of_query[p] = fma_f32(state[n][j][p], query.v[n].v[j], of_query[p]);
                }
            }
        }
        f32 d[PAIR];
        UNROLL for (u32 p = 0; p < PAIR; p++) {
            d[p] = amount * fma_f32(-g, wave_sum<SHARERS>(of_key[p]), staged.values[i][pair_at() + p]);
            results[p] = fma_f32(kq, d[p], g * wave_sum<SHARERS>(of_query[p]));
        }
        UNROLL for (u32 n = 0; n < MAX / 32; n++) {
            UNROLL for (u32 j = 0; j < 4; j++) {
                UNROLL for (u32 p = 0; p < PAIR; p++) {
                    state[n][j][p] = fma_f32(key.v[n].v[j], d[p], g * state[n][j][p]);
                }
            }
        }
    }

    DEV static u32 key_of(u32 n, u32 j) { return 32 * n + 4 * sharer() + j; }
    DEV u32 column() const { return first + pair_at(); }
    // The place of a key's pair in S. The last of keys and columns stand for what is past them.
    DEV u64 pair_of(u32 key) const {
        const u64 row = (u64)head * task.key_dim + min_u32(key, task.key_dim - 1);
        return row * task.value_dim + min_u32(column(), task.value_dim - PAIR);
    }
    // All loads are in flight together. Keys past the last have zeros in LDS, so their values may be any.
    DEV void load(const f32* s) {
        UNROLL for (u32 n = 0; n < MAX / 32; n++) {
            UNROLL for (u32 j = 0; j < 4; j++) {
                const u32x2 raw = load8(s + pair_of(key_of(n, j)));
                state[n][j][0] = as_f32(raw.x);
                state[n][j][1] = as_f32(raw.y);
            }
        }
    }
    DEV void store(f32* s) const {
        UNROLL for (u32 n = 0; n < MAX / 32; n++) {
            UNROLL for (u32 j = 0; j < 4; j++) {
                const u32 key = key_of(n, j);
                if (key >= task.key_dim || column() >= task.value_dim) continue;
                store8(s + pair_of(key), {as_u32(state[n][j][0]), as_u32(state[n][j][1])});
            }
        }
    }
};

template <u32 MAX> DEV void run(const Task& task, const u32* runs, u64 state_offset) {
    const Run run(runs, block_z());
    if (run.rows == 0 || block_x() * stripe() >= task.value_dim) return;
    LDS(staged, Staged<MAX>);
    Job<MAX> job = {task, staged, block_y(), block_x() * stripe(), {}};
    if (run.after == 0) return clear_outputs(job.out(run.first), job.outputs());
    compute_rows<MAX>(job, run, state_offset);
}

} // namespace delta_rule

#define DELTA_RULE(MAX)                                                                                                        \
    KERNEL(256, delta_rule_##MAX, const f32* from, const f32* decay, const f32* decay_bias, const f32* rate,                   \
           const f32* amount, const u32* runs, f32* out, u64 state_offset, f32 eps, u32 stride, u32 decay_stride,              \
           u32 amount_stride, u32 out_stride, u32 bias_stride, u32 rate_stride, u32 keys, u32 key_dim, u32 values,             \
           u32 value_dim, u32 in_turn) {                                                                                       \
        const u32 head = block_y(), key_head = in_turn != 0 ? head % keys : head / (values / keys);                            \
        const f32* q = from + key_head * key_dim;                                                                              \
        const f32* k = q + keys * key_dim;                                                                                     \
        const delta_rule::Task task = {q,                                                                                      \
                                       k,                                                                                      \
                                       from + 2 * keys * key_dim,                                                              \
                                       decay,                                                                                  \
                                       amount,                                                                                 \
                                       out,                                                                                    \
                                       decay_bias[head * bias_stride],                                                         \
                                       rate[head * rate_stride],                                                               \
                                       eps,                                                                                    \
                                       stride,                                                                                 \
                                       decay_stride,                                                                           \
                                       amount_stride,                                                                          \
                                       out_stride,                                                                             \
                                       key_dim,                                                                                \
                                       value_dim};                                                                             \
        wait_for_predecessor();                                                                                                \
        delta_rule::run<MAX>(task, runs, state_offset);                                                                        \
    }

DELTA_RULE(64)
DELTA_RULE(128)
DELTA_RULE(256)
