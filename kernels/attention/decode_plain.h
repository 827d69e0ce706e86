// attn_decode on vector units: f32 queries, weights and sums; pages of any type, heads of any size.
#pragma once
#include "decode.h"
#include "decode_state.h"

namespace attn_decode {

constexpr u32 THREADS = 256, TEAMS = THREADS / TEAM;
// Size of the LDS array through which teams exchange their sums, in f32.
constexpr u32 EXCHANGE = 4096;
// Most values of a block's heads: g * head_dim.
constexpr u32 RESULT = 1024;

// LDS of a block while it walks its splits.
struct PlainShared : Shared {
    f32* exchange;    // [TEAMS][heads at a time][LANES * PART]
    f32* team_most;   // [TEAMS][8], then each team's factor
    f32* team_sum;    // [TEAMS][8]
    f32* most;        // [8]
    f32* sum;         // [8]
    f32* queries;     // [heads][LANES * PART], scaled, 0 past head_dim
};

// Joins the teams' parts of a split: result[g][d] unnormalised, most[g], sum[g].
template <u32 LANES, u32 G> DEV void join_block(const TeamState<LANES, G>& state, const PlainShared& lds, u32 head_dim) {
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

// Stores a split's result for the last block of the row to combine. EXACT: head_dim is a multiple of 8.
template <bool EXACT> DEV void hand_in(const Task& t, const Place& at, const PlainShared& lds) {
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

// Puts the heads' queries, scaled, into lds.queries. A head past the last is the last again.
template <u32 LANES, u32 G, bool EXACT> DEV void take_queries(const Task& t, const Place& at, const PlainShared& lds) {
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

// Adds a split's tokens, the first of which are on their way; the first of the block's next split are at its end. `newest`: as
// renew() takes it; not read where pages hold all tokens.
template <class T, u32 LANES, u32 G, u32 U, bool EXACT>
DEV void add_split(const Place& at, const PlainShared& lds, f32 cap, Walk<T, LANES, U, EXACT>& walk, State<LANES, G, U>& state,
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

template <class T, u32 LANES, u32 G, bool EXACT> DEV void run_plain(const Task& t) {
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
    PlainShared lds{{result, weights}, exchange, team_most, team_sums, most, sums, queries};
    // Rows, positions and page tables were copied before the step's first launch, which ended long ago.
    Place at(t, G, [&](u32 len) { return split_tokens(t.window == 0 ? len : min_u32(len, t.window), t.splits_max); });
    if (at.split >= max_u32(at.splits, 1)) return;
    if (at.padding) {
        wait_for_predecessor();
        for (u32 i = thread_id(); i < at.heads * t.head_dim; i += THREADS) result[i] = 0.0f;
        barrier_lds();
        write_out<THREADS>(t, at, lds);
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
    if (makes) {
        const HeadMaker<THREADS, EXACT, T, LANES * PART> maker(t, at, G);
        if constexpr (EXACT) {
            maker.template make_ahead<(G + 2 + TEAMS - 1) / TEAMS>(queries, walk.pages, newest);
        } else {
            wait_for_predecessor();
            maker.make(queries, walk.pages, newest);
        }
    } else {
        wait_for_predecessor();
        if (EXACT) walk.fetch();
        take_queries<LANES, G, EXACT>(t, at, lds);
    }
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
        // Models with few KV heads have many splits.
        combine<THREADS, EXACT ? LANES * PART : 0, G == 8 ? 16 : 8>(t, at, lds);
    }
    write_out<THREADS>(t, at, lds);
}

} // namespace attn_decode
