// attn_decode: out = softmax(q . K / sqrt(head_dim)) V, causal, for few rows, each row's tokens split over blocks
//
// Shapes     q: f32[M][n_heads * head_dim], rotated; rows: u32[R], the rows to do, or null for 0..R
//            qkv: f32[M][(n_heads + 2 * n_kv_heads) * head_dim], or null. Where it is not null, the kernel norms and rotates as
//            rope_kv does, to the same bits, and q is not read. It writes each row's key and value to their pages. q_norm, k_norm, angles,
//            eps, rope_dims, pairs_by_halves: as there
//            positions, row_seq: u32[M], as attn_prefill.hip has them; NO_SEQUENCE: the result is 0; page_tables, page_base,
//            layer_offset: common/pages.h
//            window: a row at position p attends to positions max(0, p + 1 - window)..=p, or 0: to all up to p. Tokens before
//            the window are not read, nor are page table entries of pages that hold only such tokens
//            scale: log2(e) / sqrt(head_dim)
//            cap: scores x become cap * tanh(x / cap), in units of log2; or 0: they stay
//            sinks: f32[n_heads], or null: one more score of each head, whose value is 0; scale does not apply to it
//            part_values: f32[R][n_heads][S][head_dim], part_stats: f32[R][n_heads][S][2], S = grid y * each: scratch for splits
//            counters: u32[R][grid x], 0 before the first launch, and 0 again after each
//            Out, at the row's own number; each that is null is not written:
//            out: f32[M][n_heads * head_dim]; codes, scales, sums: A8 rows of `padded` values (common/activation.h);
//            halves, row_scales: X16 rows, in tiles where `tiled` is 1; their scales are 1, as a mean of f16 values fits f16
// Variants   attn_decode_<f16 | i8 | f32>_<64 | 128 | any>_<g>: element of the pages; head_dim, any up to 256, for i8 a multiple of
//            32; a block does g query heads of a KV head, so that it reads keys and values once for them
// Requires   with qkv: no two rows of one sequence. g <= 8; for A8: g * head_dim and n_heads / n_kv_heads * head_dim multiples of 32; for X16: head_dim a multiple of
//            4, and f16 or i8 pages (past 65504 a result of the latter is infinite)
// Launch     grid = (n_kv_heads * ceil(n_heads / n_kv_heads / g), ceil(splits / each), R), block = 256. split_tokens
//            (attention/splits.h) cuts a row by its position; a row has the splits that reach into its window. A block takes `each`
//            splits, one after the other. splits >= what any row has, and may be more. Blocks past a row's own splits return at once
// Alignment  16 bytes for pages and q
// Sums in    f32. A row's bits depend on its own tokens and the variant; not on other rows, grid, `each` or wave size
// Tolerance  |got - want| <= 2e-5 * sum of |weight * value|; 1.02e-3 for scores about 200 from 0 in units of log2
//            A8, X16: the bounds of tests/kernels/forms.rs around the f32 result; X16: 2^-11 * |f32 result| + 2^-25
// Reference  f64 `attend` in tests/kernels/pages.rs, compared in tests/kernels/attention.rs; with qkv: rope_kv
//            and attention of its results, bit for bit, in tests/kernels/making.rs
// Moves      4 (f16 pages) or 2.125 (i8) * head_dim bytes in per token and KV head, once per block of g heads; memory-bound, and
//            bound by latency at short lengths
#include "prelude/prelude.h"
#include "common/activation.h"
#include "common/heads.h"
#include "common/pages.h"
#include "common/reduce.h"
#include "attention/decode_state.h"

namespace attn_decode {

constexpr u32 THREADS = 256, TEAMS = THREADS / TEAM;
// Size of the LDS array through which teams exchange their sums, in f32.
constexpr u32 EXCHANGE = 4096;
// Most values of a block's heads: g * head_dim.
constexpr u32 RESULT = 1024;

// Heads that the kernel makes itself; a null qkv: they are made.
struct Source {
    const f32* qkv;
    const f32* q_norm;
    const f32* k_norm;
    const f32* angles;
    f32 eps;
    u32 rope_dims, pairs_by_halves;
};

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
    f16* halves;
    f32* row_scales;
    const f32* sinks;
    u64 layer_offset;
    f32 scale, cap;
    u32 n_heads, n_kv_heads, head_dim, table_stride, padded, window, tiled, each;
    Source source;

    // Splits that the scratch has room for.
    DEV u32 room() const { return grid_y() * each; }
    // Weight of a head's sink beside a greatest score of `most`. A sink far above it is infinite, and the result is 0.
    DEV f32 sink(u32 head, f32 most) const { return sinks ? exp2_f32(fma_f32(sinks[head], LOG2_E, -most)) : 0.0f; }
};

// A block's work: a row, some query heads of a KV head, splits `split` to `split_end` of the row's. Split 0 is the first that the
// window reaches.
struct Place {
    u32 slot, row, first_head, heads, kv_head, split, split_end, start, end, splits, tokens, len;
    bool padding;

    DEV Place(const Task& t, u32 group_max) {
        u32 group = t.n_heads / t.n_kv_heads, blocks = ceil_div(group, group_max);
        slot = block_z();
        row = t.rows ? t.rows[slot] : slot;
        kv_head = block_x() / blocks;
        u32 done = block_x() % blocks * group_max;
        first_head = kv_head * group + done;
        heads = min_u32(group_max, group - done);
        split = block_y() * t.each;
        padding = t.row_seq[row] == NO_SEQUENCE;
        len = padding ? 0 : t.positions[row] + 1;
        tokens = split_tokens(len);
        u32 seen_from = first_seen(len, t.window), before = seen_from / tokens;
        splits = ceil_div(len, tokens) - before;
        split_end = min_u32(split + t.each, splits);
        u32 cut = (before + split) * tokens;
        start = max_u32(cut, seen_from);
        end = min_u32(cut + tokens, len);
    }

    // Goes on to the block's next split.
    DEV void next() {
        split++;
        start = end;
        end = min_u32(end + tokens, len);
    }
    // Whether the block has a next split.
    DEV bool has_next() const { return split + 1 < split_end; }
    // Whether the row's own token is in the block's last split.
    DEV bool has_newest() const { return split_end == splits; }
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
    f32* queries;     // [heads][LANES * PART], scaled, 0 past head_dim
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
    const bool is_last = at.first_head + at.heads == t.n_heads;
    auto each = [&](u32 end, auto use) {
        for (u32 start = 0; start < end; start += THREADS * 4) {
            u32 k = start + thread_id() * 4;
            Four values;
            UNROLL for (u32 i = 0; i < 4; i++) values.v[i] = k + i < count ? lds.result[k + i] : 0.0f;
            use(k, values);
        }
    };
    if (t.codes) {
        A8Row row = a8_row(t.codes, t.scales, t.sums, at.row, t.padded);
        const u32 end = is_last ? t.padded - first : count;
        each(end, [&](u32 k, const Four& values) { store_a8(row, first + k, first + end, values); });
    }
    if (t.halves) {
        const X16Row row(t.halves, at.row, cols, t.tiled);
        const u32 end = is_last ? row.end() - first : count;
        if (is_last && thread_id() == 0) t.row_scales[at.row] = 1.0f;
        each(end, [&](u32 k, const Four& values) {
            if (k < end) row.store(first + k, values, 1.0f);
        });
    }
}

// Stores a split's result for the last block of the row to combine. EXACT: head_dim is a multiple of 8.
template <bool EXACT> DEV void hand_in(const Task& t, const Place& at, const Shared& lds) {
    constexpr u32 WIDE = EXACT ? 4 : 1;
    for (u32 i = thread_id() * WIDE; i < at.heads * t.head_dim; i += THREADS * WIDE) {
        u64 head = (u64)at.slot * t.n_heads + at.first_head + i / t.head_dim;
        f32* to = t.part_values + (head * t.room() + at.split) * t.head_dim + i % t.head_dim;
        if constexpr (EXACT) store16(to, load16(lds.result + i));
        else *to = lds.result[i];
    }
    if (thread_id() < at.heads) {
        f32* stats = t.part_stats + (((u64)at.slot * t.n_heads + at.first_head + thread_id()) * t.room() + at.split) * 2;
        stats[0] = lds.most[thread_id()];
        stats[1] = lds.sum[thread_id()];
    }
}

// The weight of each split: lds.weights. One head per team.
DEV void weigh(const Task& t, const Place& at, const Shared& lds) {
    constexpr u32 EACH = SPLITS_MAX / TEAM;
    // Teams without a head repeat the last: all lanes of a wave reduce together.
    u32 g = min_u32(team_id(), at.heads - 1);
    const f32* stats = t.part_stats + ((u64)at.slot * t.n_heads + at.first_head + g) * t.room() * 2;
    f32 most[EACH], sums[EACH], top = NO_SCORE, sum = 0.0f;
    UNROLL for (u32 i = 0; i < EACH; i++) {
        const u32 s = i * TEAM + team_lane();
        const bool exists = s < at.splits;
        most[i] = exists ? stats[2 * s] : NO_SCORE;
        sums[i] = exists ? stats[2 * s + 1] : 0.0f;
    }
    UNROLL for (u32 i = 0; i < EACH; i++) top = max_f32(top, most[i]);
    top = team_max(top);
    UNROLL for (u32 i = 0; i < EACH; i++) {
        most[i] = exp2_f32(most[i] - top);
        sum = fma_f32(sums[i], most[i], sum);
    }
    sum = team_sum(sum) + t.sink(at.first_head + g, top);
    if (team_id() >= at.heads) return;
    UNROLL for (u32 i = 0; i < EACH; i++) {
        const u32 s = i * TEAM + team_lane();
        if (s < at.splits) lds.weights[g * SPLITS_MAX + s] = most[i] / sum;
    }
}

// Sums the splits into lds.result in rising order and normalises.
template <bool EXACT> DEV void combine(const Task& t, const Place& at, const Shared& lds) {
    // Values of a lane, and splits that it has in flight: their loads are most of the time.
    constexpr u32 WIDE = EXACT ? 4 : 1, FLIGHT = 8;
    const u64 first = (u64)at.slot * t.n_heads + at.first_head;
    const u32 count = at.heads * t.head_dim;
    Four parts[FLIGHT];
    auto fetch = [&](u32 i, u32 from) {
        const f32* values = t.part_values + (first + i / t.head_dim) * t.room() * t.head_dim + i % t.head_dim;
        UNROLL for (u32 p = 0; p < FLIGHT; p++) {
            if (from + p < at.splits) parts[p] = load_four(values + u64(from + p) * t.head_dim, 0, WIDE, EXACT);
        }
    };
    if (thread_id() * WIDE < count) fetch(thread_id() * WIDE, 0);
    weigh(t, at, lds);
    barrier_lds();
    for (u32 i = thread_id() * WIDE; i < count; i += THREADS * WIDE) {
        if (i >= THREADS * WIDE) fetch(i, 0);
        const f32* weights = lds.weights + i / t.head_dim * SPLITS_MAX;
        f32 sum[WIDE] = {};
        for (u32 from = 0;;) {
            UNROLL for (u32 p = 0; p < FLIGHT; p++) {
                if (from + p >= at.splits) continue;
                UNROLL for (u32 d = 0; d < WIDE; d++) sum[d] = fma_f32(parts[p].v[d], weights[from + p], sum[d]);
            }
            from += FLIGHT;
            if (from >= at.splits) break;
            fetch(i, from);
        }
        UNROLL for (u32 d = 0; d < WIDE; d++) lds.result[i + d] = sum[d];
    }
    barrier_lds();
}

// Loads part `part` of a token. EXACT: head_dim is that of all lanes' parts; else elements past head_dim become 0.
template <class T, bool EXACT> DEV void load_part(Raw<T>& raw, const Token<T>& token, u32 part, u32 head_dim) {
    if constexpr (EXACT) {
        raw.load(token, part);
    } else if constexpr (IS_CODED<T>) {
        raw.clear();
        if (part * PART < head_dim) raw.load(token, part);
    } else {
        struct alignas(16) Elements {
            T v[PART];
        } elements;
        UNROLL for (u32 d = 0; d < PART; d++) {
            if (part * PART + d < head_dim) elements.v[d] = token.values[part * PART + d];
            else to_element(0.0f, elements.v[d]);
        }
        raw.load({elements.v}, 0);
    }
}

// A token's key and value in LDS. Scales of codes follow both.
template <class T, u32 WIDTH> struct Newest {
    static constexpr u32 SIZE = 2 * WIDTH + (IS_CODED<T> ? 2 * WIDTH / KV_GROUP * sizeof(f16) : 0);
    T* room;

    DEV T* values(bool is_value) const { return room + is_value * WIDTH; }
    DEV f16* scales(bool is_value) const { return (f16*)(room + 2 * WIDTH) + is_value * (WIDTH / KV_GROUP); }
    DEV Token<T> token(bool is_value) const {
        if constexpr (IS_CODED<T>) return {values(is_value), scales(is_value)};
        else return {values(is_value)};
    }
};

// Puts the heads' queries, scaled, into lds.queries. A head past the last is the last again.
template <u32 LANES, u32 G, bool EXACT> DEV void take_queries(const Task& t, const Place& at, const Shared& lds) {
    constexpr u32 WIDTH = LANES * PART;
    const u32 head_dim = EXACT ? WIDTH : t.head_dim;
    const f32* first = t.q + ((u64)at.row * t.n_heads + at.first_head) * head_dim;
    UNROLL for (u32 start = 0; start < G * WIDTH; start += THREADS * 4) {
        const u32 i = start + thread_id() * 4;
        if (i >= G * WIDTH) continue;
        Four q = load_four(first + min_u32(i / WIDTH, at.heads - 1) * head_dim, i % WIDTH, head_dim, EXACT);
        UNROLL for (u32 d = 0; d < 4; d++) q.v[d] *= t.scale;
        store_four(lds.queries, i, G * WIDTH, true, q);
    }
}

// Keys and values of the tokens that a group of lanes reads next.
template <class T, u32 LANES, u32 U, bool EXACT> struct Walk {
    static constexpr u32 GROUPS = THREADS / LANES;
    HeadPages<T> pages;
    u32 group, part, head_dim;
    Token<T> places[U];
    Raw<T> keys[U], values[U];

    DEV Walk(const Task& t, const Place& at)
        : pages(t.page_base, t.page_tables, t.table_stride, t.row_seq[at.row], t.layer_offset, t.n_kv_heads, at.kv_head,
                EXACT ? LANES * PART : t.head_dim),
          group(thread_id() / LANES), part(thread_id() % LANES), head_dim(EXACT ? LANES * PART : t.head_dim) {}

    // Looks up U tokens of each group from `start` on. Past the end it is the last token again, which state.add ignores.
    DEV void find(u32 start, u32 end) {
        UNROLL for (u32 u = 0; u < U; u++) places[u] = pages.key_token(min_u32(start + u * GROUPS + group, end - 1));
    }
    // Loads what was looked up.
    DEV void fetch() {
        UNROLL for (u32 u = 0; u < U; u++) {
            load_part<T, EXACT>(keys[u], places[u], part, head_dim);
            load_part<T, EXACT>(values[u], places[u].past(pages.plane_bytes), part, head_dim);
        }
    }
    // Puts the row's own token, number `token`, in place of what its page held when it was read. `newest`: its key and value.
    DEV void renew(u32 start, u32 token, const Newest<T, LANES * PART>& newest) {
        UNROLL for (u32 u = 0; u < U; u++) {
            if (start + u * GROUPS + group != token) continue;
            load_part<T, EXACT>(keys[u], newest.token(false), part, head_dim);
            load_part<T, EXACT>(values[u], newest.token(true), part, head_dim);
        }
    }
    // The group's tokens from `start` on.
    DEV u32 have(u32 start, u32 end) const {
        const u32 left = end - start;
        return left > group ? (left - group + GROUPS - 1) / GROUPS : 0;
    }
};

// Makes the block's heads: queries, scaled, to lds.queries; where the row's own token is the block's, its key and value to `newest`
// and, from one block of the KV head, to their page.
template <class T, u32 LANES, u32 G, u32 U, bool EXACT>
DEV void make_heads(const Task& t, const Place& at, const Shared& lds, const Walk<T, LANES, U, EXACT>& walk,
                    const Newest<T, LANES * PART>& newest) {
    constexpr u32 WIDTH = LANES * PART;
    const Source& of = t.source;
    const u32 items = G + (at.has_newest() ? 2 : 0), all = t.n_heads + 2 * t.n_kv_heads, position = at.len - 1;
    // All teams of a wave take part in sums: past the last head they repeat it and store nothing.
    ROLLED for (u32 first = 0; first < items; first += TEAMS) {
        const u32 item = min_u32(first + team_id(), items - 1);
        const bool is_key = item == G, is_value = item == G + 1;
        const u32 kv = t.n_heads + (is_value ? t.n_kv_heads : 0) + at.kv_head;
        const u32 number = item < G ? at.first_head + min_u32(item, at.heads - 1) : kv;
        Head head{{}, {}, t.head_dim, of.rope_dims, of.pairs_by_halves != 0};
        head.load(of.qkv + ((u64)at.row * all + number) * t.head_dim);
        if (of.q_norm || of.k_norm) head.norm(is_value ? nullptr : is_key ? of.k_norm : of.q_norm, of.eps);
        if (!is_value) head.rotate(of.angles + (u64)position * of.rope_dims);
        HeadScales<T> scales;
        if (first + TEAMS > G) scales.measure(head);
        if (first + team_id() >= items) continue;
        if (item < G) {
            f32* to = lds.queries + item * WIDTH;
            head.scale(t.scale);
            head.store(to);
            if (EXACT) continue;
            for (u32 d = t.head_dim + team_lane(); d < WIDTH; d += TEAM) to[d] = 0.0f;
        } else {
            scales.store(head, newest.values(is_value), newest.scales(is_value));
            if (at.first_head != at.kv_head * (t.n_heads / t.n_kv_heads)) continue;
            T* keys = walk.pages.keys(position / KV_PAGE_TOKENS);
            scales.store_token(head, is_value ? walk.pages.values_of(keys) : keys, position % KV_PAGE_TOKENS);
        }
    }
}

// Adds a split's tokens, the first of which are on their way; the first of the block's next split are at its end. `newest`: as
// renew() takes it; not read where pages hold all tokens.
template <class T, u32 LANES, u32 G, u32 U, bool EXACT>
DEV void add_split(const Place& at, const Shared& lds, f32 cap, Walk<T, LANES, U, EXACT>& walk, State<LANES, G, U>& state,
                   const Newest<T, LANES * PART>& newest, bool makes) {
    for (u32 start = at.start;;) {
        const u32 next = start + walk.GROUPS * U;
        const bool is_last = next >= at.end;
        // The next addresses are on their way while these tokens are added.
        if (!is_last) walk.find(next, at.end);
        else if (at.has_next()) walk.find(at.end, min_u32(at.end + at.tokens, at.len));
        if (makes && is_last && at.end == at.len) walk.renew(start, at.len - 1, newest);
        state.add(lds.queries + walk.part * PART, walk.keys, walk.values, walk.have(start, at.end), cap);
        if (!is_last || at.has_next()) walk.fetch();
        if (is_last) return;
        start = next;
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
    LDS(queries, f32[G * LANES * PART]);
    LDS(newest_room, T[Newest<T, LANES * PART>::SIZE]);
    const Newest<T, LANES * PART> newest{newest_room};
    Shared lds{exchange, team_most, team_sums, most, sums, result, weights, queries};
    // Rows, positions and page tables were copied before the step's first launch, which ended long ago.
    Place at(t, G);
    if (at.split >= max_u32(at.splits, 1)) return;
    if (at.padding) {
        wait_for_predecessor();
        for (u32 i = thread_id(); i < at.heads * t.head_dim; i += THREADS) result[i] = 0.0f;
        barrier_lds();
        write_out(t, at, lds);
        return;
    }
    // Tokens that a group of lanes has in flight: 64 in a block, fewer where registers would not suffice.
    constexpr u32 U = LANES == 8 || G == 8 ? 2 : 4;
    Walk<T, LANES, U, EXACT> walk(t, at);
    // Addresses, then tokens, then queries: at short lengths these loads are most of the time.
    walk.find(at.start, at.end);
    const bool makes = t.source.qkv != nullptr;
    // Earlier steps wrote all tokens but the row's own. For heads of any size, registers would not suffice.
    if (EXACT && makes) walk.fetch();
    wait_for_predecessor();
    if (EXACT && !makes) walk.fetch();
    if (makes) make_heads<T, LANES, G, U, EXACT>(t, at, lds, walk, newest);
    else take_queries<LANES, G, EXACT>(t, at, lds);
    if (!EXACT) walk.fetch();
    barrier_lds();
    for (;;) {
        State<LANES, G, U> state;
        add_split<T, LANES, G, U, EXACT>(at, lds, t.cap, walk, state, newest, makes);
        join_block(TeamState<LANES, G>(state), lds, t.head_dim);
        if (at.splits == 1) break;
        hand_in<EXACT>(t, at, lds);
        if (!at.has_next()) break;
        at.next();
    }
    if (at.splits == 1) {
        for (u32 i = thread_id(); i < at.heads * t.head_dim; i += THREADS) {
            const u32 g = i / t.head_dim;
            result[i] /= sums[g] + t.sink(at.first_head + g, most[g]);
        }
        barrier_lds();
    } else {
        if (!last_block(t.counters + at.slot * grid_x() + block_x(), ceil_div(at.splits, t.each))) return;
        combine<EXACT>(t, at, lds);
    }
    write_out(t, at, lds);
}

} // namespace attn_decode

#define ATTN_DECODE(NAME, T, LANES, G, EXACT)                                                                                  \
    KERNEL_TWICE(256, NAME, const f32* q, const u32* rows, const u32* positions, const u32* row_seq, const u32* page_tables,   \
           const u64* page_base, f32* part_values, f32* part_stats, u32* counters, f32* out, i8* codes, f32* scales,           \
           i16* sums, f16* halves, f32* row_scales, const f32* sinks, u64 layer_offset, f32 scale, f32 cap, u32 n_heads,       \
           u32 n_kv_heads, u32 head_dim, u32 table_stride, u32 padded, u32 window, u32 tiled, u32 each, const f32* qkv,        \
           const f32* q_norm, const f32* k_norm, const f32* angles, f32 eps, u32 rope_dims, u32 pairs_by_halves) {             \
        attn_decode::run<T, LANES, G, EXACT>({q, rows, positions, row_seq, page_tables, page_base, part_values, part_stats,    \
                                              counters, out, codes, scales, sums, halves, row_scales, sinks, layer_offset,     \
                                              scale, cap, n_heads, n_kv_heads, head_dim, table_stride, padded, window, tiled,  \
                                              each, {qkv, q_norm, k_norm, angles, eps, rope_dims, pairs_by_halves}});          \
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
ATTN_DECODE(attn_decode_i8_64_1, i8, 8, 1, true)
ATTN_DECODE(attn_decode_i8_64_2, i8, 8, 2, true)
ATTN_DECODE(attn_decode_i8_64_4, i8, 8, 4, true)
ATTN_DECODE(attn_decode_i8_64_8, i8, 8, 8, true)
ATTN_DECODE(attn_decode_i8_128_1, i8, 16, 1, true)
ATTN_DECODE(attn_decode_i8_128_2, i8, 16, 2, true)
ATTN_DECODE(attn_decode_i8_128_4, i8, 16, 4, true)
ATTN_DECODE(attn_decode_i8_128_8, i8, 16, 8, true)
ATTN_DECODE(attn_decode_i8_any_1, i8, 32, 1, false)
ATTN_DECODE(attn_decode_i8_any_4, i8, 32, 4, false)
ATTN_DECODE(attn_decode_f32_any_1, f32, 32, 1, false)
ATTN_DECODE(attn_decode_f32_any_4, f32, 32, 4, false)
