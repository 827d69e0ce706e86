// What both bodies of attn_decode share: the task, a block's place in it, heads that the block makes, the join of a row's
// splits.
#pragma once
#include "../common/activation.h"
#include "../common/heads.h"
#include "../common/pages.h"
#include "../common/reduce.h"
#include "splits.h"

namespace attn_decode {

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
    u32 n_heads, n_kv_heads, head_dim, table_stride, padded, window, tiled, each, splits_max;
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

    // `tokens_of`: tokens of a split, by the row's tokens.
    template <class F> DEV Place(const Task& t, u32 group_max, F tokens_of) {
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
        tokens = tokens_of(len);
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

// LDS of a block for what all bodies do last.
struct Shared {
    f32* result;      // [heads][head_dim]
    f32* weights;     // [8][SPLITS_MAX]
};

// Writes the heads' values from lds.result to every output that is not null.
template <u32 THREADS> DEV void write_out(const Task& t, const Place& at, const Shared& lds) {
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

// The weight of each split: lds.weights. One head per team at a time.
template <u32 THREADS> DEV void weigh(const Task& t, const Place& at, const Shared& lds) {
    constexpr u32 EACH = SPLITS_MAX / TEAM, TEAMS = THREADS / TEAM;
    ROLLED for (u32 first = 0; first < at.heads; first += TEAMS) {
        // Teams without a head repeat the last: all lanes of a wave reduce together.
        const u32 mine = first + team_id(), g = min_u32(mine, at.heads - 1);
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
        if (mine >= at.heads) continue;
        UNROLL for (u32 i = 0; i < EACH; i++) {
            const u32 s = i * TEAM + team_lane();
            if (s < at.splits) lds.weights[g * SPLITS_MAX + s] = most[i] / sum;
        }
    }
}

// Sums the splits into lds.result in rising order and normalises.
// HEAD: head_dim, a multiple of 8, or 0: any. FLIGHT: splits that a lane has in flight; their loads are most of the time.
template <u32 THREADS, u32 HEAD, u32 FLIGHT> DEV void combine(const Task& t, const Place& at, const Shared& lds) {
    constexpr u32 WIDE = HEAD ? 4 : 1; // values of a lane
    const u32 head_dim = HEAD ? HEAD : t.head_dim;
    const u64 first = (u64)at.slot * t.n_heads + at.first_head;
    const u32 count = at.heads * head_dim;
    Four parts[FLIGHT];
    auto fetch = [&](u32 i, u32 from) {
        const f32* values = t.part_values + (first + i / head_dim) * t.room() * head_dim + i % head_dim;
        UNROLL for (u32 p = 0; p < FLIGHT; p++) {
            if (from + p < at.splits) parts[p] = load_four(values + u64(from + p) * head_dim, 0, WIDE, HEAD != 0);
        }
    };
    if (thread_id() * WIDE < count) fetch(thread_id() * WIDE, 0);
    weigh<THREADS>(t, at, lds);
    barrier_lds();
    for (u32 i = thread_id() * WIDE; i < count; i += THREADS * WIDE) {
        if (i >= THREADS * WIDE) fetch(i, 0);
        const f32* weights = lds.weights + i / head_dim * SPLITS_MAX;
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

// Makes the block's heads, each by a team: `count` queries, scaled, to `queries`, where those past the block's last are the last again;
// where the row's own token is the block's, its key and value to `newest` and, from one block of the KV head, to their page. EXACT:
// head_dim is WIDTH.
template <u32 THREADS, bool EXACT, class T, u32 WIDTH> struct HeadMaker {
    static constexpr u32 TEAMS = THREADS / TEAM;
    const Task& t;
    const Place& at;
    u32 count, items, head_dim, position;

    DEV HeadMaker(const Task& t, const Place& at, u32 count)
        : t(t), at(at), count(count), items(count + (at.has_newest() ? 2 : 0)), head_dim(EXACT ? WIDTH : t.head_dim), position(at.len - 1) {}

    // A team's item in a round. Past the last one teams repeat it and store nothing: all teams of a wave take part in sums.
    DEV u32 item(u32 round) const { return min_u32(round * TEAMS + team_id(), items - 1); }
    DEV bool is_key(u32 item) const { return item == count; }
    DEV bool is_value(u32 item) const { return item == count + 1; }

    // The head without its values.
    DEV Head shape() const { return {{}, {}, head_dim, t.source.rope_dims, t.source.pairs_by_halves != 0}; }
    DEV HeadFactors factors(u32 item) const {
        const Source& of = t.source;
        return shape().factors(is_value(item) ? nullptr : is_key(item) ? of.k_norm : of.q_norm,
                               is_value(item) ? nullptr : of.angles + (u64)position * of.rope_dims);
    }
    DEV Head load(u32 item) const {
        const u32 kv = t.n_heads + (is_value(item) ? t.n_kv_heads : 0) + at.kv_head;
        const u32 number = item < count ? at.first_head + min_u32(item, at.heads - 1) : kv;
        Head head = shape();
        head.load(t.source.qkv + ((u64)at.row * (t.n_heads + 2 * t.n_kv_heads) + number) * head_dim);
        return head;
    }
    DEV void finish(u32 round, Head& head, const HeadFactors& by, f32* queries, const HeadPages<T>& pages, const Newest<T, WIDTH>& newest) const {
        const u32 item = this->item(round);
        if (t.source.q_norm || t.source.k_norm) head.norm(by, t.source.eps);
        head.rotate(by);
        HeadScales<T> scales;
        if ((round + 1) * TEAMS > count) scales.measure(head);
        if (round * TEAMS + team_id() >= items) return;
        if (item < count) {
            f32* to = queries + item * WIDTH;
            head.scale(t.scale);
            head.store(to);
            if constexpr (!EXACT) {
                for (u32 d = head_dim + team_lane(); d < WIDTH; d += TEAM) to[d] = 0.0f;
            }
            return;
        }
        scales.store(head, newest.values(is_value(item)), newest.scales(is_value(item)));
        if (at.first_head != at.kv_head * (t.n_heads / t.n_kv_heads)) return;
        T* keys = pages.keys(position / KV_PAGE_TOKENS);
        scales.store_token(head, is_value(item) ? pages.values_of(keys) : keys, position % KV_PAGE_TOKENS);
    }
    // At most ROUNDS rounds. Waits for the launch before; factors are on their way then, and afterwards the values of all rounds.
    template <u32 ROUNDS> DEV void make_ahead(f32* queries, const HeadPages<T>& pages, const Newest<T, WIDTH>& newest) const {
        HeadFactors by[ROUNDS];
        Head heads[ROUNDS];
        UNROLL for (u32 round = 0; round < ROUNDS; round++) by[round] = factors(item(round));
        wait_for_predecessor();
        UNROLL for (u32 round = 0; round < ROUNDS; round++) heads[round] = load(item(round));
        UNROLL for (u32 round = 0; round < ROUNDS; round++) {
            if (round * TEAMS < items) finish(round, heads[round], by[round], queries, pages, newest);
        }
    }
    // All rounds, one after the other.
    DEV void make(f32* queries, const HeadPages<T>& pages, const Newest<T, WIDTH>& newest) const {
        ROLLED for (u32 round = 0; round * TEAMS < items; round++) {
            const HeadFactors by = factors(item(round));
            Head head = load(item(round));
            finish(round, head, by, queries, pages, newest);
        }
    }
};

} // namespace attn_decode
