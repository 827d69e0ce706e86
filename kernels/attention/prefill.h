// The task and a block's tile of queries, which both bodies of attn_prefill share.
//
// A tile is some neighbouring rows of one sequence. With the query heads of one KV head these are up to QUERIES queries, row by
// row, heads within a row. All walk the sequence's pages together, 32 tokens at a time, from the first page that the first
// query sees.
#pragma once
#include "../common/pages.h"
#include "../common/reduce.h"
#include "splits.h"

namespace prefill {

// Queries of a block.
constexpr u32 QUERIES = 64;

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
    u64 layer_offset;
    f32 scale;
    u32 n_heads, n_kv_heads, head_dim, table_stride, window;
};

struct Tile {
    const Task& task;
    u32 first_row, rows, kv_head, group;

    DEV explicit Tile(const Task& t)
        : task(t), first_row(t.tiles[2 * block_y()]), rows(t.tiles[2 * block_y() + 1]), kv_head(block_x()),
          group(t.n_heads / t.n_kv_heads) {}

    DEV u32 queries() const { return min_u32(rows * group, QUERIES); }
    // Tokens up to that of query `i`; 0 where the tile has no query `i`.
    DEV u32 length(u32 i) const { return i < queries() ? task.positions[first_row + i / group] + 1 : 0; }
    // Tokens of the longest of queries 0..end.
    DEV u32 longest(u32 end) const { return length(min_u32(end, queries()) - 1); }
    // The first token that query `i` sees.
    DEV u32 seen_from(u32 i) const { return first_seen(length(i), task.window); }
    // Where query i and its result begin, in values.
    DEV u64 at(u32 i) const {
        return ((u64)(first_row + i / group) * task.n_heads + kv_head * group + i % group) * task.head_dim;
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
    DEV void store_scales() const {
        if (!task.out16 || kv_head != 0) return;
        for (u32 i = thread_id(); i < rows; i += block_threads()) task.row_scales[first_row + i] = 1.0f;
    }
};

} // namespace prefill
