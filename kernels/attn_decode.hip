// attn_decode: out = softmax(q . K / sqrt(head_dim)) V, causal, for few rows, each row's tokens split over blocks
//
// Shapes     q: f32[M][n_heads * head_dim], rotated; rows: u32[R], the rows to do, or null for 0..R
//            positions, row_seq: u32[M]; NO_SEQUENCE: the result is 0; page_tables, page_base, layer_offset: common/pages.h
//            window: a row at position p attends to positions max(0, p + 1 - window)..=p, or 0: to all up to p. Tokens before
//            the window are not read, nor are page table entries of pages that hold only such tokens
//            scale: log2(e) / sqrt(head_dim)
//            part_values: f32[R][n_heads][S][head_dim], part_stats: f32[R][n_heads][S][2], S = grid y: scratch for splits
//            counters: u32[R][grid x], 0 before the first launch, and 0 again after each
//            Out, at the row's own number; each that is null is not written:
//            out: f32[M][n_heads * head_dim]; codes, scales, sums: A8 rows of `padded` values (common/activation.h)
// Variants   attn_decode_<f16 | f32>_<64 | 128 | any>_<g>: element of the pages; head_dim, any up to 256; a block does g query
//            heads of a KV head, so that it reads keys and values once for them
// Requires   g <= 8; for A8: g * head_dim and n_heads / n_kv_heads * head_dim multiples of 32
// Launch     grid = (n_kv_heads * ceil(n_heads / n_kv_heads / g), splits, R), block = 256. split_tokens (attention/splits.h)
//            cuts a row by its position; a row has the splits that reach into its window. splits >= what any row has, and may
//            be more. Blocks past a row's own splits return at once
// Alignment  16 bytes for pages and q
// Sums in    f32. A row's bits depend on its own tokens and the variant; not on other rows, not on grid, not on wave size
// Tolerance  |got - want| <= 2e-5 * sum of |weight * value|; 1.02e-3 for scores about 200 from 0 in units of log2
//            A8: the bounds of tests/kernels/forms.rs around the f32 result
// Reference  f64 `attend` in tests/kernels/pages.rs, compared in tests/kernels/attention.rs
// Moves      4 * head_dim bytes (f16 pages) in per token and KV head, once per block of g heads; memory-bound, and bound by
//            latency at short lengths
#include "prelude/prelude.h"
#include "common/activation.h"
#include "common/pages.h"
#include "common/reduce.h"
#include "attention/decode_state.h"

namespace attn_decode {

constexpr u32 THREADS = 256, TEAMS = THREADS / TEAM;
// Size of the LDS array through which teams exchange their sums, in f32.
constexpr u32 EXCHANGE = 4096;
// Most values of a block's heads: g * head_dim.
constexpr u32 RESULT = 1024;

// The launch's arguments.
struct Task {
    const f32* q;
    const u32* rows;
    const u32* positions;
    const u32* row_seq;
    const u32* page_tables;
    const u64* page_base;
    f32* part_values;
    f32* part_stats;
    u32* counters;
    f32* out;
    i8* codes;
    f32* scales;
    i16* sums;
    u64 layer_offset;
    f32 scale;
    u32 n_heads, n_kv_heads, head_dim, table_stride, padded, window;
};

// A block's work: a row, some query heads of a KV head, a split. Split 0 is the first that the window reaches.
struct Place {
    u32 slot, row, first_head, heads, kv_head, split, start, end, splits;
    bool padding;

    DEV Place(const Task& t, u32 group_max) {
        u32 group = t.n_heads / t.n_kv_heads, blocks = ceil_div(group, group_max);
        slot = block_z();
        row = t.rows ? t.rows[slot] : slot;
        kv_head = block_x() / blocks;
        u32 done = block_x() % blocks * group_max;
        first_head = kv_head * group + done;
        heads = min_u32(group_max, group - done);
        split = block_y();
        padding = t.row_seq[row] == NO_SEQUENCE;
        u32 len = padding ? 0 : t.positions[row] + 1, tokens = split_tokens(len);
        u32 seen_from = first_seen(len, t.window), before = seen_from / tokens;
        splits = ceil_div(len, tokens) - before;
        u32 cut = (before + split) * tokens;
        start = max_u32(cut, seen_from);
        end = min_u32(cut + tokens, len);
    }
};

// LDS of a block.
struct Shared {
    f32* exchange;    // [TEAMS][heads at a time][LANES * PART]
    f32* team_most;   // [TEAMS][8], then each team's factor
    f32* team_sum;    // [TEAMS][8]
    f32* most;        // [8]
    f32* sum;         // [8]
    f32* result;      // [heads][head_dim]
    f32* weights;     // [8][SPLITS_MAX]
};

// Joins the teams' parts of a split: result[g][d] unnormalised, most[g], sum[g].
template <u32 LANES, u32 G> DEV void join_block(const TeamState<LANES, G>& state, const Shared& lds, u32 head_dim) {
    constexpr u32 WIDTH = LANES * PART, AT_ONCE = EXCHANGE / (TEAMS * WIDTH);
    u32 part = thread_id() % LANES;
    if (team_lane() == 0) {
        UNROLL for (u32 g = 0; g < G; g++) {
            lds.team_most[team_id() * 8 + g] = state.most[g];
            lds.team_sum[team_id() * 8 + g] = state.sum[g];
        }
    }
    barrier_lds();
    if (thread_id() < G) {
        u32 g = thread_id();
        f32 top = NO_SCORE, sum = 0.0f;
        for (u32 t = 0; t < TEAMS; t++) top = max_f32(top, lds.team_most[t * 8 + g]);
        for (u32 t = 0; t < TEAMS; t++) {
            f32 factor = exp2_f32(lds.team_most[t * 8 + g] - top);
            lds.team_most[t * 8 + g] = factor;
            sum = fma_f32(lds.team_sum[t * 8 + g], factor, sum);
        }
        lds.most[g] = top;
        lds.sum[g] = sum;
    }
    UNROLL for (u32 first = 0; first < G; first += AT_ONCE) {
        barrier_lds();
        UNROLL for (u32 g = first; g < G && g < first + AT_ONCE; g++) {
            f32* to = lds.exchange + (team_id() * AT_ONCE + g - first) * WIDTH + part * PART;
            if (team_lane() < LANES) {
                UNROLL for (u32 d = 0; d < PART; d++) to[d] = state.values[g][d];
            }
        }
        barrier_lds();
        for (u32 i = thread_id(); i < min_u32(AT_ONCE, G - first) * WIDTH; i += THREADS) {
            u32 g = first + i / WIDTH, d = i % WIDTH;
            f32 value = 0.0f;
            UNROLL for (u32 t = 0; t < TEAMS; t++) {
                value = fma_f32(lds.exchange[t * AT_ONCE * WIDTH + i], lds.team_most[t * 8 + g], value);
            }
            if (d < head_dim) lds.result[g * head_dim + d] = value;
        }
    }
    barrier_lds();
}

// Writes the heads' values from lds.result to every output that is not null.
DEV void write_out(const Task& t, const Place& at, const Shared& lds) {
    u32 cols = t.n_heads * t.head_dim, first = at.first_head * t.head_dim, count = at.heads * t.head_dim;
    u64 to = (u64)at.row * cols + first;
    for (u32 i = thread_id(); i < count; i += THREADS) {
        if (t.out) t.out[to + i] = lds.result[i];
    }
    if (!t.codes) return;
    bool is_last = at.first_head + at.heads == t.n_heads;
    A8Row row = a8_row(t.codes, t.scales, t.sums, at.row, t.padded);
    u32 end = is_last ? t.padded - first : count;
    for (u32 start = 0; start < end; start += THREADS * 4) {
        u32 k = start + thread_id() * 4;
        Four values;
        UNROLL for (u32 i = 0; i < 4; i++) values.v[i] = k + i < count ? lds.result[k + i] : 0.0f;
        store_a8(row, first + k, first + end, values);
    }
}

// Stores a split's result for the last block of the row's splits to combine. True in that block.
DEV bool hand_in(const Task& t, const Place& at, const Shared& lds) {
    for (u32 i = thread_id(); i < at.heads * t.head_dim; i += THREADS) {
        u64 head = (u64)at.slot * t.n_heads + at.first_head + i / t.head_dim;
        t.part_values[(head * grid_y() + at.split) * t.head_dim + i % t.head_dim] = lds.result[i];
    }
    if (thread_id() < at.heads) {
        f32* stats = t.part_stats + (((u64)at.slot * t.n_heads + at.first_head + thread_id()) * grid_y() + at.split) * 2;
        stats[0] = lds.most[thread_id()];
        stats[1] = lds.sum[thread_id()];
    }
    return last_block(t.counters + at.slot * grid_x() + block_x(), at.splits);
}

// Sums the splits into lds.result in rising order and normalises.
DEV void combine(const Task& t, const Place& at, const Shared& lds) {
    u64 first = (u64)at.slot * t.n_heads + at.first_head;
    // One head per team. Teams without a head repeat the last: all lanes of a wave reduce together.
    u32 g = min_u32(team_id(), at.heads - 1);
    const f32* stats = t.part_stats + (first + g) * grid_y() * 2;
    f32 top = NO_SCORE, sum = 0.0f;
    for (u32 s = team_lane(); s < at.splits; s += TEAM) top = max_f32(top, stats[2 * s]);
    top = team_max(top);
    for (u32 s = team_lane(); s < at.splits; s += TEAM) sum = fma_f32(stats[2 * s + 1], exp2_f32(stats[2 * s] - top), sum);
    sum = team_sum(sum);
    if (team_id() < at.heads) {
        for (u32 s = team_lane(); s < at.splits; s += TEAM) {
            lds.weights[g * SPLITS_MAX + s] = exp2_f32(stats[2 * s] - top) / sum;
        }
    }
    barrier_lds();
    for (u32 i = thread_id(); i < at.heads * t.head_dim; i += THREADS) {
        u32 head = i / t.head_dim;
        const f32* values = t.part_values + (first + head) * grid_y() * t.head_dim + i % t.head_dim;
        f32 value = 0.0f;
#pragma unroll 4
        for (u32 s = 0; s < at.splits; s++) {
            value = fma_f32(values[(u64)s * t.head_dim], lds.weights[head * SPLITS_MAX + s], value);
        }
        lds.result[i] = value;
    }
    barrier_lds();
}

// Loads part `part` of a token. EXACT: head_dim is a multiple of 8; else elements past head_dim become 0.
template <class T, bool EXACT> DEV void load_part(Raw<T>& raw, const T* token, u32 part, u32 head_dim) {
    if constexpr (EXACT) {
        raw.load(token + part * PART);
    } else {
        struct alignas(16) Elements {
            T v[PART];
        } elements;
        UNROLL for (u32 d = 0; d < PART; d++) {
            if (part * PART + d < head_dim) elements.v[d] = token[part * PART + d];
            else to_element(0.0f, elements.v[d]);
        }
        raw.load(elements.v);
    }
}

template <class T, u32 LANES, u32 G, u32 U, bool EXACT>
DEV void run_split(const Task& t, const Place& at, State<LANES, G, U>& state) {
    constexpr u32 GROUPS = THREADS / LANES;
    u32 group = thread_id() / LANES, part = thread_id() % LANES, head_dim = EXACT ? LANES * PART : t.head_dim;
    HeadPages<T> pages(t.page_base, t.page_tables, t.table_stride, t.row_seq[at.row], t.layer_offset, t.n_kv_heads, at.kv_head,
                       head_dim);
    Raw<T> keys[U], values[U];
    auto fetch = [&](u32 start) {
        UNROLL for (u32 u = 0; u < U; u++) {
            // Past the end the last token is loaded again; state.add ignores it.
            const T* key = pages.key(min_u32(start + u * GROUPS + group, at.end - 1));
            load_part<T, EXACT>(keys[u], key, part, head_dim);
            load_part<T, EXACT>(values[u], pages.values_of((T*)key), part, head_dim);
        }
    };
    // Queries and the first tokens load together: at short lengths these loads are most of the time.
    Raw<f32> queries[G];
    UNROLL for (u32 g = 0; g < G; g++) {
        const f32* head = t.q + ((u64)at.row * t.n_heads + at.first_head + min_u32(g, at.heads - 1)) * head_dim;
        load_part<f32, EXACT>(queries[g], head, part, head_dim);
    }
    fetch(at.start);
    f32 q[G][PART];
    UNROLL for (u32 g = 0; g < G; g++) {
        queries[g].unpack(q[g]);
        UNROLL for (u32 d = 0; d < PART; d++) q[g][d] *= t.scale;
    }
    for (u32 start = at.start;;) {
        u32 left = at.end - start;
        state.add(q, keys, values, left > group ? (left - group + GROUPS - 1) / GROUPS : 0);
        start += GROUPS * U;
        if (start >= at.end) break;
        fetch(start);
    }
}

template <class T, u32 LANES, u32 G, bool EXACT> DEV void run(const Task& t) {
    LDS(exchange, f32[EXCHANGE]);
    LDS(result, f32[RESULT]);
    LDS(weights, f32[8 * SPLITS_MAX]);
    LDS(team_most, f32[TEAMS * 8]);
    LDS(team_sums, f32[TEAMS * 8]);
    LDS(most, f32[8]);
    LDS(sums, f32[8]);
    Shared lds{exchange, team_most, team_sums, most, sums, result, weights};
    wait_for_predecessor();
    Place at(t, G);
    if (at.split >= max_u32(at.splits, 1)) return;
    if (at.padding) {
        for (u32 i = thread_id(); i < at.heads * t.head_dim; i += THREADS) result[i] = 0.0f;
        barrier_lds();
        write_out(t, at, lds);
        return;
    }
    // Tokens that a group of lanes has in flight: 64 in a block, fewer where registers would not suffice.
    constexpr u32 U = LANES == 8 || G == 8 ? 2 : 4;
    State<LANES, G, U> state;
    run_split<T, LANES, G, U, EXACT>(t, at, state);
    join_block(TeamState<LANES, G>(state), lds, t.head_dim);
    if (at.splits == 1) {
        for (u32 i = thread_id(); i < at.heads * t.head_dim; i += THREADS) result[i] /= sums[i / t.head_dim];
        barrier_lds();
    } else {
        if (!hand_in(t, at, lds)) return;
        combine(t, at, lds);
    }
    write_out(t, at, lds);
}

} // namespace attn_decode

#define ATTN_DECODE(NAME, T, LANES, G, EXACT)                                                                                  \
    KERNEL(256, NAME, const f32* q, const u32* rows, const u32* positions, const u32* row_seq, const u32* page_tables,         \
           const u64* page_base, f32* part_values, f32* part_stats, u32* counters, f32* out, i8* codes, f32* scales,           \
           i16* sums, u64 layer_offset, f32 scale, u32 n_heads, u32 n_kv_heads, u32 head_dim, u32 table_stride, u32 padded,    \
           u32 window) {                                                                                                       \
        attn_decode::run<T, LANES, G, EXACT>({q, rows, positions, row_seq, page_tables, page_base, part_values, part_stats,    \
                                              counters, out, codes, scales, sums, layer_offset, scale, n_heads, n_kv_heads,    \
                                              head_dim, table_stride, padded, window});                                        \
    }

ATTN_DECODE(attn_decode_f16_64_1, f16, 8, 1, true)
ATTN_DECODE(attn_decode_f16_64_2, f16, 8, 2, true)
ATTN_DECODE(attn_decode_f16_64_4, f16, 8, 4, true)
ATTN_DECODE(attn_decode_f16_64_8, f16, 8, 8, true)
ATTN_DECODE(attn_decode_f16_128_1, f16, 16, 1, true)
ATTN_DECODE(attn_decode_f16_128_2, f16, 16, 2, true)
ATTN_DECODE(attn_decode_f16_128_4, f16, 16, 4, true)
ATTN_DECODE(attn_decode_f16_128_8, f16, 16, 8, true)
ATTN_DECODE(attn_decode_f16_any_1, f16, 32, 1, false)
ATTN_DECODE(attn_decode_f16_any_4, f16, 32, 4, false)
ATTN_DECODE(attn_decode_f32_any_1, f32, 32, 1, false)
ATTN_DECODE(attn_decode_f32_any_4, f32, 32, 4, false)
