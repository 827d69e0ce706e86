// attn_wide: out = softmax(q . K / sqrt(head_dim)) V, causal, heads of up to 576 values, each row's tokens split over blocks
//
// For heads wider than attn_decode and attn_prefill take: latent attention, whose many query heads share one wide KV head.
// Shapes     q: f32[R][n_heads * head_dim], rotated; positions, row_seq: u32[R], as attn_prefill.hip has them; NO_SEQUENCE: the
//            result is 0. page_tables, page_base, layer_offset: common/pages.h
//            window, scale, cap, sinks: as of attn_decode
//            part_values: f32[R][n_heads][grid y][head_dim], part_stats: f32[R][n_heads][grid y][2]: scratch, and counters:
//            u32[R][grid x], 0 before the first launch, and 0 again after each; not used for grid y 1
//            out: f32[R][n_heads * head_dim]
// Variants   attn_wide_f16, attn_wide_f32: element of the pages
// Requires   head_dim even
// Launch     grid = (n_kv_heads * ceil(n_heads / n_kv_heads / 16), splits, R), block = 256. split_tokens_of (attention/splits.h)
//            cuts a row by its position; a row has the splits that reach into its window. splits >= what any row has, at most
//            128. Blocks past a row's own splits return at once
// Alignment  16 bytes for pages and q, 4 for all else. If head_dim is not a multiple of 4, q is read value by value
// Sums in    f32. A row's bits depend on its own tokens; not on other rows, grid or wave size
// Tolerance  |got - want| <= 2e-5 * sum of |weight * value|; 1.02e-3 for scores about 200 from 0 in units of log2
// Reference  f64 `attend` in tests/kernels/pages.rs, compared in tests/kernels/wide.rs
// Moves      4 * head_dim bytes (f16 pages) in per token and KV head, once per block of 16 heads; bound by arithmetic
#include "prelude/prelude.h"
#include "common/pages.h"
#include "common/reduce.h"
#include "attention/splits.h"

namespace attn_wide {

constexpr u32 HEAD_MAX = 576, PARTS = HEAD_MAX / TEAM, TEAMS = 256 / TEAM;
// Query heads of a team and of a block.
constexpr u32 TEAM_HEADS = 2, HEADS = TEAM_HEADS * TEAMS;
// Tokens in LDS, and the distance of two.
constexpr u32 TOKENS = 16, STRIDE = HEAD_MAX + 1;

// The launch's arguments.
struct Task {
    const f32* q;
    const u32* positions;
    const u32* row_seq;
    const u32* page_tables;
    const u64* page_base;
    f32* part_values;
    f32* part_stats;
    u32* counters;
    f32* out;
    const f32* sinks;
    u64 layer_offset;
    f32 scale, cap;
    u32 n_heads, n_kv_heads, head_dim, table_stride, window;
};

// A block's work: a row, up to 16 query heads of a KV head, and a split of the row's tokens.
struct Place {
    u32 row, kv_head, first_head, heads, splits, split, start, end;
    bool padding;

    DEV explicit Place(const Task& t) {
        const u32 group = t.n_heads / t.n_kv_heads, blocks = ceil_div(group, HEADS), done = block_x() % blocks * HEADS;
        row = block_z();
        kv_head = block_x() / blocks;
        first_head = kv_head * group + done;
        heads = min_u32(HEADS, group - done);
        padding = t.row_seq[row] == NO_SEQUENCE;
        split = block_y();
        const u32 len = padding ? 0 : t.positions[row] + 1, tokens = split_tokens_of(len);
        const u32 seen_from = first_seen(len, t.window), before = seen_from / tokens, cut = (before + split) * tokens;
        splits = ceil_div(len, tokens) - before;
        start = max_u32(cut, seen_from);
        end = min_u32(cut + tokens, len);
    }
    // A team's heads past the block's last repeat it, and store nothing.
    DEV u32 head(u32 i) const { return first_head + min_u32(team_id() * TEAM_HEADS + i, heads - 1); }
    DEV bool has(u32 i) const { return team_id() * TEAM_HEADS + i < heads; }
};

// Two neighbouring elements, the first at an even place.
DEV f32x2 load_two(const f16* p) { return unpack_f16x2(load4(p)); }
DEV f32x2 load_two(const f32* p) {
    const u32x2 raw = load8(p);
    return {as_f32(raw.x), as_f32(raw.y)};
}

// Loads keys or values of TOKENS tokens to LDS, a team a token. Those that are not of start..end become 0: they may never
// have been written.
template <class T> DEV void load_tokens(f32* to, const T* from, u32 at, const Place& place, u32 head_dim) {
    barrier_lds();
    for (u32 i = team_id(); i < TOKENS; i += TEAMS) {
        const bool seen = at + i >= place.start && at + i < place.end;
        for (u32 d = 2 * team_lane(); d < head_dim; d += 2 * TEAM) {
            f32x2 two = {0.0f, 0.0f};
            if (seen) two = load_two(from + (u64)i * head_dim + d);
            to[i * STRIDE + d] = two.x;
            to[i * STRIDE + d + 1] = two.y;
        }
    }
    barrier_lds();
}

// Online softmax of a team's heads. Lane l has token l % 16 of those in LDS, and of values those at l, l + 32, ...
struct State {
    f32 most[TEAM_HEADS], sum[TEAM_HEADS], weight[TEAM_HEADS], values[TEAM_HEADS][PARTS];

    DEV State() {
        UNROLL for (u32 i = 0; i < TEAM_HEADS; i++) {
            most[i] = NO_SCORE, sum[i] = 0.0f, weight[i] = 0.0f;
            UNROLL for (u32 j = 0; j < PARTS; j++) values[i][j] = 0.0f;
        }
    }

    // Lanes 0..16 take the lower 16 of each 32 values of their token's key, lanes 16..32 the upper ones.
    DEV void take_keys(const Task& t, const Place& place, const f32* keys, u32 at) {
        const u32 token = team_lane() % TOKENS, upper = team_lane() / TOKENS * TOKENS;
        const f32* key = keys + token * STRIDE;
        const f32* q[TEAM_HEADS];
        f32 score[TEAM_HEADS];
        UNROLL for (u32 i = 0; i < TEAM_HEADS; i++) {
            q[i] = t.q + ((u64)place.row * t.n_heads + place.head(i)) * t.head_dim;
            score[i] = 0.0f;
        }
        // Queries come from a cache, four values a load where no head ends between.
        const u32 whole = t.head_dim % 4 == 0 ? t.head_dim / (2 * TOKENS) * (2 * TOKENS) : 0;
        ROLLED for (u32 first = upper; first < whole; first += 2 * TOKENS) {
            // All loads at once would take more registers than NVIDIA's compiler grants.
            ROLLED for (u32 d = 0; d < TOKENS; d += 4) {
                UNROLL for (u32 i = 0; i < TEAM_HEADS; i++) {
                    const u32x4 four = load16(q[i] + first + d);
                    UNROLL for (u32 j = 0; j < 4; j++) score[i] = fma_f32(as_f32(four[j]), key[first + d + j], score[i]);
                }
            }
        }
        ROLLED for (u32 first = upper + whole; first < t.head_dim; first += 2 * TOKENS) {
            ROLLED for (u32 d = first; d < min_u32(first + TOKENS, t.head_dim); d++) {
                UNROLL for (u32 i = 0; i < TEAM_HEADS; i++) score[i] = fma_f32(q[i][d], key[d], score[i]);
            }
        }
        const bool seen = at + token >= place.start && at + token < place.end;
        UNROLL for (u32 i = 0; i < TEAM_HEADS; i++) {
            const f32 scaled = capped((score[i] + shfl_xor(score[i], TOKENS)) * t.scale, t.cap);
            const f32 top = max_f32(most[i], team_max(seen ? scaled : NO_SCORE)), factor = exp2_f32(most[i] - top);
            weight[i] = seen ? exp2_f32(scaled - top) : 0.0f;
            most[i] = top;
            // Both halves of the team have all weights.
            sum[i] = fma_f32(sum[i], factor, team_sum(upper == 0 ? weight[i] : 0.0f));
            UNROLL for (u32 j = 0; j < PARTS; j++) values[i][j] *= factor;
        }
    }

    // Tokens that are not seen are 0 in LDS, and so is their weight.
    DEV void take_values(const f32* page, u32 head_dim) {
        ROLLED for (u32 token = 0; token < TOKENS; token++) {
            f32 of_token[TEAM_HEADS];
            UNROLL for (u32 i = 0; i < TEAM_HEADS; i++) of_token[i] = shfl(weight[i], lane() / TEAM * TEAM + token);
            UNROLL for (u32 j = 0; j < PARTS; j++) {
                const u32 d = team_lane() + j * TEAM;
                const f32 value = d < head_dim ? page[token * STRIDE + d] : 0.0f;
                UNROLL for (u32 i = 0; i < TEAM_HEADS; i++) values[i][j] = fma_f32(of_token[i], value, values[i][j]);
            }
        }
    }

    DEV void store(const Task& t, const Place& place, u32 i, f32 all) const {
        f32* to = t.out + ((u64)place.row * t.n_heads + place.head(i)) * t.head_dim;
        UNROLL for (u32 j = 0; j < PARTS; j++) {
            const u32 d = team_lane() + j * TEAM;
            if (place.has(i) && d < t.head_dim) to[d] = values[i][j] / all;
        }
    }
};

// Number of a head's part, the first of a row's splits.
DEV u64 part_of(const Task& t, const Place& place, u32 i) { return ((u64)place.row * t.n_heads + place.head(i)) * grid_y(); }

// Weight of head i's sink beside a greatest score of `most`. A sink far above it is infinite, and the result is 0.
DEV f32 sink(const Task& t, const Place& place, u32 i, f32 most) {
    return t.sinks ? exp2_f32(fma_f32(t.sinks[place.head(i)], LOG2_E, -most)) : 0.0f;
}

DEV void hand_in(const Task& t, const Place& place, const State& state) {
    UNROLL for (u32 i = 0; i < TEAM_HEADS; i++) {
        if (!place.has(i)) continue;
        const u64 part = part_of(t, place, i) + place.split;
        UNROLL for (u32 j = 0; j < PARTS; j++) {
            const u32 d = team_lane() + j * TEAM;
            if (d < t.head_dim) t.part_values[part * t.head_dim + d] = state.values[i][j];
        }
        if (team_lane() != 0) continue;
        t.part_stats[2 * part] = state.most[i];
        t.part_stats[2 * part + 1] = state.sum[i];
    }
}

// Joins the splits of head i in rising order.
DEV void join(const Task& t, const Place& place, State& state, u32 i) {
    const u64 first = part_of(t, place, i);
    f32 top = NO_SCORE, sum = 0.0f;
    for (u32 s = 0; s < place.splits; s++) top = max_f32(top, t.part_stats[2 * (first + s)]);
    UNROLL for (u32 j = 0; j < PARTS; j++) state.values[i][j] = 0.0f;
    ROLLED for (u32 s = 0; s < place.splits; s++) {
        const f32 factor = exp2_f32(t.part_stats[2 * (first + s)] - top);
        sum = fma_f32(t.part_stats[2 * (first + s) + 1], factor, sum);
        UNROLL for (u32 j = 0; j < PARTS; j++) {
            const u32 d = team_lane() + j * TEAM;
            if (d < t.head_dim) state.values[i][j] = fma_f32(t.part_values[(first + s) * t.head_dim + d], factor, state.values[i][j]);
        }
    }
    state.store(t, place, i, sum + sink(t, place, i, top));
}

template <class T> DEV void run(const Task& t) {
    LDS(page, f32[TOKENS * STRIDE]);
    wait_for_predecessor();
    const Place place(t);
    if (place.padding) {
        State none;
        if (block_y() == 0) {
            UNROLL for (u32 i = 0; i < TEAM_HEADS; i++) none.store(t, place, i, 1.0f);
        }
        return;
    }
    if (place.split >= place.splits) return;
    const HeadPages<T> pages(t.page_base, t.page_tables, t.table_stride, t.row_seq[place.row], t.layer_offset, t.n_kv_heads,
                             place.kv_head, t.head_dim);
    State state;
    for (u32 at = place.start / TOKENS * TOKENS; at < place.end; at += TOKENS) {
        T* keys = pages.keys(at / KV_PAGE_TOKENS);
        const u64 in_page = (u64)(at % KV_PAGE_TOKENS) * t.head_dim;
        load_tokens(page, (const T*)keys + in_page, at, place, t.head_dim);
        state.take_keys(t, place, page, at);
        load_tokens(page, (const T*)pages.values_of(keys) + in_page, at, place, t.head_dim);
        state.take_values(page, t.head_dim);
    }
    if (place.splits == 1) {
        UNROLL for (u32 i = 0; i < TEAM_HEADS; i++) state.store(t, place, i, state.sum[i] + sink(t, place, i, state.most[i]));
        return;
    }
    hand_in(t, place, state);
    if (!last_block(t.counters + place.row * grid_x() + block_x(), place.splits)) return;
    UNROLL for (u32 i = 0; i < TEAM_HEADS; i++) join(t, place, state, i);
}

} // namespace attn_wide

#define ATTN_WIDE(NAME, T)                                                                                                     \
    KERNEL(256, NAME, const f32* q, const u32* positions, const u32* row_seq, const u32* page_tables, const u64* page_base,    \
           f32* part_values, f32* part_stats, u32* counters, f32* out, const f32* sinks, u64 layer_offset, f32 scale, f32 cap, \
           u32 n_heads, u32 n_kv_heads, u32 head_dim, u32 table_stride, u32 window) {                                          \
        attn_wide::run<T>({q, positions, row_seq, page_tables, page_base, part_values, part_stats, counters, out, sinks,       \
                           layer_offset, scale, cap, n_heads, n_kv_heads, head_dim, table_stride, window});                    \
    }

ATTN_WIDE(attn_wide_f16, f16)
ATTN_WIDE(attn_wide_f32, f32)
