// The task and a block's tile of queries, which the bodies of attn_prefill and attn_around share.
//
// A tile is some neighbouring rows of one sequence. With the query heads of one KV head these are up to QUERIES queries, row by
// row, heads within a row; up to WIDE_QUERIES on the wide matrix unit. All walk the sequence's pages together, 32 or 64 tokens at
// a time, from the first page that the first query sees. With few tiles several blocks share a tile, and each walks a part of its pages. Otherwise the walk through a long
// sequence would take most of a step: 128 pages took 0.28 ms on an H100.
#pragma once
#include "../common/pages.h"
#include "../common/reduce.h"
#include "splits.h"

namespace prefill {

// Queries of a block.
constexpr u32 QUERIES = 64;
// Most blocks that share a tile, and the distance of the weights of two queries in LDS.
constexpr u32 SHARES_MAX = 32, SHARE_STRIDE = SHARES_MAX + 4;

// The launch's arguments.
struct Task {
    const f32* q;
    const u32* tiles;
    const u32* positions;
    const u32* row_seq;
    const u32* page_tables;
    const u64* page_base;
    f32* out;
    f16* out16;
    f32* row_scales;
    f32* part_values;
    f32* part_stats;
    u32* counters;
    const f32* sinks;
    u64 layer_offset;
    f32 scale, cap;
    u32 n_heads, n_kv_heads, head_dim, table_stride, window;
    // For windows that look both ways: the last position of each row's text, and whether scores fall with the distance (ALiBi).
    const u32* ends = nullptr;
    u32 falls = 0;
};

// Tokens of the pages that a block walks: whole pages, except at the sequence's end. Empty if end <= start.
struct Walk {
    u32 start, end;
};

// AROUND: each query sees `window / 2` tokens before its own, and as many after it. Else the window ends with its own. MOST:
// queries that a tile may have.
template <bool AROUND, u32 MOST = QUERIES> struct Tile {
    const Task& task;
    u32 first_row, rows, kv_head, group;

    DEV explicit Tile(const Task& t)
        : task(t), first_row(t.tiles[2 * block_y()]), rows(t.tiles[2 * block_y() + 1]), kv_head(block_x()),
          group(t.n_heads / t.n_kv_heads) {}

    DEV u32 queries() const { return min_u32(rows * group, MOST); }
    // Tokens up to the last that query `i` sees; 0 where the tile has no query `i`.
    DEV u32 length(u32 i) const {
        if (i >= queries()) return 0;
        const u32 row = first_row + i / group;
        if constexpr (AROUND) return min_u32(task.positions[row] + task.window / 2, task.ends[row]) + 1;
        else return task.positions[row] + 1;
    }
    // Tokens of the longest of queries 0..end.
    DEV u32 longest(u32 end) const { return length(min_u32(end, queries()) - 1); }
    // The first token that query `i` sees.
    DEV u32 seen_from(u32 i) const {
        if constexpr (AROUND) return i < queries() ? first_seen(task.positions[first_row + i / group] + 1, task.window / 2 + 1) : 0;
        else return first_seen(length(i), task.window);
    }
    // Where query `i` stands in its text. Not for queries that the tile does not have.
    DEV u32 position(u32 i) const { return task.positions[first_row + i / group]; }
    // What a score of query `i` falls by for each token of distance, in units of log2: 2^(-8 h / n) for head h, from 1, of n. Heads
    // past a power of two take the powers halfway between.
    DEV f32 slope(u32 i) const {
        const u32 head = kv_head * group + i % group, whole = 1u << (31 - clz(task.n_heads));
        const f32 power = head < whole ? f32(head + 1) / f32(whole) : f32(2 * (head - whole) + 1) / f32(2 * whole);
        return LOG2_E * exp2_f32(-8.0f * power);
    }
    // Where query i and its result begin, in values.
    DEV u64 at(u32 i) const {
        return ((u64)(first_row + i / group) * task.n_heads + kv_head * group + i % group) * task.head_dim;
    }

    // Weight of query i's sink beside a greatest score of `most`. A sink far above it is infinite, and the result is 0.
    DEV f32 sink(u32 i, f32 most) const {
        return task.sinks ? exp2_f32(fma_f32(task.sinks[kv_head * group + i % group], LOG2_E, -most)) : 0.0f;
    }

    template <class T> DEV HeadPages<T> pages() const {
        return HeadPages<T>(task.page_base, task.page_tables, task.table_stride, task.row_seq[first_row], task.layer_offset,
                            task.n_kv_heads, kv_head, task.head_dim);
    }

    DEV void store(u32 i, u32 d, f32 value) const {
        u64 to = at(i) + d;
        if (task.out) task.out[to] = value;
        if (task.out16) task.out16[to] = f32_to_f16(value);
    }
    // Values d and d + 1, d even.
    DEV void store_two(u32 i, u32 d, f32 low, f32 high) const {
        const u64 to = at(i) + d;
        if (task.out) store8(task.out + to, {as_u32(low), as_u32(high)});
        if (task.out16) *(u32*)(task.out16 + to) = pack_f16x2(low, high);
    }
    // The block's part of tokens first..length, `first` the first of a page.
    DEV Walk walk(u32 first, u32 length) const {
        const u32 pages = ceil_div(length - first, KV_PAGE_TOKENS), each = ceil_div(pages, grid_z()) * KV_PAGE_TOKENS;
        const u32 start = first + block_z() * each;
        return {start, min_u32(start + each, length)};
    }

    // Number of share `s` of the tile.
    DEV u32 share(u32 s) const { return (block_y() * grid_x() + block_x()) * grid_z() + s; }
    // Weighted sums of query i over the tokens of a share, not normalised.
    DEV f32* part(u32 s, u32 i) const { return task.part_values + ((u64)share(s) * MOST + i) * task.head_dim; }
    // Their greatest score and sum of weights.
    DEV f32* stats(u32 s, u32 i) const { return task.part_stats + ((u64)share(s) * MOST + i) * 2; }
    DEV void store_stats(u32 i, f32 most, f32 sum) const {
        f32* to = stats(block_z(), i);
        to[0] = most;
        to[1] = sum;
    }

    // The last of the blocks that share the tile joins their sums in rising order. `weights`: f32[MOST][SHARE_STRIDE] in LDS.
    // The whole block calls, after it has stored its own.
    DEV void join(f32* weights) const {
        const u32 shares = grid_z();
        if (!last_block(task.counters + block_y() * grid_x() + block_x(), shares)) return;
        for (u32 i = thread_id(); i < queries(); i += block_threads()) {
            f32* mine = weights + i * SHARE_STRIDE;
            f32 top = NO_SCORE, sum = 0.0f;
            for (u32 s = 0; s < shares; s++) top = max_f32(top, stats(s, i)[0]);
            for (u32 s = 0; s < shares; s++) {
                mine[s] = exp2_f32(stats(s, i)[0] - top);
                sum = fma_f32(stats(s, i)[1], mine[s], sum);
            }
            sum += sink(i, top);
            for (u32 s = 0; s < shares; s++) mine[s] /= sum;
        }
        barrier_lds();
        for (u32 at = thread_id(); at < queries() * task.head_dim; at += block_threads()) {
            const u32 i = at / task.head_dim, d = at % task.head_dim;
            f32 value = 0.0f;
            // A share that a query does not see has weight 0, and its sums are 0.
            for (u32 s = 0; s < shares; s++) value = fma_f32(part(s, i)[d], weights[i * SHARE_STRIDE + s], value);
            store(i, d, value);
        }
    }

    DEV void store_scales() const {
        if (!task.out16 || kv_head != 0) return;
        for (u32 i = thread_id(); i < rows; i += block_threads()) task.row_scales[first_row + i] = 1.0f;
    }
};

} // namespace prefill
