// attn_prefill without a matrix unit: f32 arithmetic, any head_dim up to 256, pages of any element.
//
// A team of 32 lanes takes 8 queries. For scores a lane takes one token of the page, for values every 32nd value of a head.
// LDS holds a page's keys, then its values, as f32.
#pragma once
#include "prefill.h"

namespace prefill {

constexpr u32 TEAM_QUERIES = 8, HEAD_MAX = 256, HEAD_PARTS = HEAD_MAX / TEAM;
// More than any token's number. `last` is larger for a query that the tile does not have.
constexpr u32 NONE = 1u << 31;

// Loads keys or values of a page to LDS. Those from token `tokens` on become 0: they were never written.
template <class T> DEV void load_page(f32* to, const T* from, u32 tokens, u32 head_dim) {
    barrier_lds();
    for (u32 i = thread_id(); i < KV_PAGE_TOKENS * head_dim; i += block_threads()) {
        u32 token = i / head_dim, d = i % head_dim;
        to[token * (head_dim + 1) + d] = token < tokens ? value_of(from, i, head_dim) : 0.0f;
    }
    barrier_lds();
}

// Online softmax of a team's queries.
template <bool AROUND> struct PlainState {
    // Queries that see unequal numbers of tokens.
    static constexpr u32 SPANS = AROUND ? TEAM_QUERIES : 1;
    u64 at[TEAM_QUERIES];
    // Number of the last token that each query sees, and how many it sees.
    u32 last[TEAM_QUERIES], span[SPANS];
    // Where each query stands, and what its scores fall by for each token of distance; AROUND alone.
    f32 position[SPANS], slope[SPANS];
    f32 most[TEAM_QUERIES], sum[TEAM_QUERIES], score[TEAM_QUERIES], values[TEAM_QUERIES][HEAD_PARTS];

    DEV PlainState(const Tile<AROUND>& tile, u32 first) {
        if constexpr (!AROUND) span[0] = tile.task.window ? min_u32(tile.task.window, NONE) : NONE;
        UNROLL for (u32 i = 0; i < TEAM_QUERIES; i++) {
            last[i] = tile.length(first + i) - 1;
            if constexpr (AROUND) {
                span[i] = last[i] + 1 - tile.seen_from(first + i);
                position[i] = is_there(i) ? f32(tile.position(first + i)) : 0.0f;
                slope[i] = is_there(i) && tile.task.falls != 0 ? tile.slope(first + i) : 0.0f;
            }
            at[i] = tile.at(is_there(i) ? first + i : 0);
            most[i] = NO_SCORE, sum[i] = 0.0f;
            UNROLL for (u32 j = 0; j < HEAD_PARTS; j++) values[i][j] = 0.0f;
        }
    }

    // A token after the last makes the difference wrap: it is larger than any span.
    DEV bool sees(u32 i, u32 token) const { return last[i] - token < span[i % SPANS]; }
    DEV bool is_there(u32 i) const { return last[i] < NONE; }

    DEV void take_keys(const Task& t, const f32* keys, u32 start) {
        UNROLL for (u32 i = 0; i < TEAM_QUERIES; i++) score[i] = 0.0f;
        const f32* key = keys + team_lane() * (t.head_dim + 1);
        for (u32 d = 0; d < t.head_dim; d++) {
            UNROLL for (u32 i = 0; i < TEAM_QUERIES; i++) score[i] = fma_f32(t.q[at[i] + d], key[d], score[i]);
        }
        UNROLL for (u32 i = 0; i < TEAM_QUERIES; i++) {
            bool seen = sees(i, start + team_lane());
            f32 scaled = capped(score[i] * t.scale, t.cap);
            if constexpr (AROUND) scaled = fma_f32(-slope[i], abs_f32(position[i] - f32(start + team_lane())), scaled);
            f32 top = max_f32(most[i], team_max(seen ? scaled : NO_SCORE));
            f32 factor = exp2_f32(most[i] - top);
            score[i] = seen ? exp2_f32(scaled - top) : 0.0f;
            most[i] = top;
            sum[i] = fma_f32(sum[i], factor, team_sum(score[i]));
            UNROLL for (u32 j = 0; j < HEAD_PARTS; j++) values[i][j] *= factor;
        }
    }

    // A value that a query does not see is not added to its sums, not even with weight 0: it may be NaN.
    DEV void take_values(u32 head_dim, const f32* page, u32 start) {
        for (u32 token = 0; token < KV_PAGE_TOKENS; token++) {
            f32 value[HEAD_PARTS];
            UNROLL for (u32 j = 0; j < HEAD_PARTS; j++) {
                u32 d = team_lane() + j * TEAM;
                value[j] = d < head_dim ? page[token * (head_dim + 1) + d] : 0.0f;
            }
            UNROLL for (u32 i = 0; i < TEAM_QUERIES; i++) {
                f32 weight = shfl(score[i], lane() / TEAM * TEAM + token);
                bool seen = sees(i, start + token);
                UNROLL for (u32 j = 0; j < HEAD_PARTS; j++) {
                    f32 more = fma_f32(weight, value[j], values[i][j]);
                    values[i][j] = seen ? more : values[i][j];
                }
            }
        }
    }

    // As a block's share of the tile.
    DEV void hand_in(const Tile<AROUND>& tile, u32 first) const {
        UNROLL for (u32 i = 0; i < TEAM_QUERIES; i++) {
            if (!is_there(i)) continue;
            if (team_lane() == 0) tile.store_stats(first + i, most[i], sum[i]);
            f32* to = tile.part(block_z(), first + i);
            UNROLL for (u32 j = 0; j < HEAD_PARTS; j++) {
                u32 d = team_lane() + j * TEAM;
                if (d < tile.task.head_dim) to[d] = values[i][j];
            }
        }
    }

    DEV void store(const Tile<AROUND>& tile, u32 first) const {
        UNROLL for (u32 i = 0; i < TEAM_QUERIES; i++) {
            const f32 all = sum[i] + tile.sink(first + i, most[i]);
            UNROLL for (u32 j = 0; j < HEAD_PARTS; j++) {
                u32 d = team_lane() + j * TEAM;
                if (is_there(i) && d < tile.task.head_dim) tile.store(first + i, d, values[i][j] / all);
            }
        }
    }
};

template <class T, bool AROUND> DEV void run_plain(const Task& t) {
    LDS(page, f32[KV_PAGE_TOKENS * (HEAD_MAX + 1)]);
    wait_for_predecessor();
    Tile<AROUND> tile(t);
    HeadPages<T> pages = tile.template pages<T>();
    u32 at_once = block_threads() / TEAM * TEAM_QUERIES;
    for (u32 first = 0; first < tile.queries(); first += at_once) {
        u32 mine = first + team_id() * TEAM_QUERIES, length = tile.longest(first + at_once);
        PlainState<AROUND> state(tile, mine);
        const Walk walk = tile.walk(tile.seen_from(first) / KV_PAGE_TOKENS * KV_PAGE_TOKENS, length);
        for (u32 start = walk.start; start < walk.end; start += KV_PAGE_TOKENS) {
            const T* keys = pages.keys(start / KV_PAGE_TOKENS);
            u32 tokens = min_u32(length - start, KV_PAGE_TOKENS);
            load_page(page, keys, tokens, t.head_dim);
            state.take_keys(t, page, start);
            load_page(page, (const T*)pages.values_of((T*)keys), tokens, t.head_dim);
            state.take_values(t.head_dim, page, start);
        }
        if (grid_z() == 1) state.store(tile, mine);
        else state.hand_in(tile, mine);
    }
    if (grid_z() > 1) {
        static_assert(QUERIES * SHARE_STRIDE <= KV_PAGE_TOKENS * (HEAD_MAX + 1), "weights of shares lie where a page lay");
        barrier_lds();
        tile.join(page);
    }
    tile.store_scales();
}

} // namespace prefill
