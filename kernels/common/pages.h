// KV pages: the place of a token's keys and values.
//
// A page holds KV_PAGE_TOKENS tokens of one sequence for all layers: [layer][k | v][kv_head][token][head_dim], f16 or f32.
// page_base[page] is a page's address; page_tables holds `table_stride` page numbers for each sequence of the step, entry p
// its positions from p * KV_PAGE_TOKENS on. Pages are 16-byte aligned.
#pragma once
#include "../prelude/prelude.h"

constexpr u32 KV_PAGE_TOKENS = 32;
// As row_seq: a padding row of a step. It reads and writes no page; its results are 0.
constexpr u32 NO_SEQUENCE = 0xffffffffu;

DEV f32 from_element(f16 v) { return f16_to_f32(v); }
DEV f32 from_element(f32 v) { return v; }
DEV void to_element(f32 v, f16& out) { out = f32_to_f16(v); }
DEV void to_element(f32 v, f32& out) { out = v; }

// One layer and KV head of one sequence's pages.
template <class T> struct HeadPages {
    const u64* page_base;
    const u32* table;
    u64 head_offset;
    u64 plane_bytes;
    u32 head_dim;

    // `layer_offset`: bytes from a page's start to the layer.
    DEV HeadPages(const u64* bases, const u32* page_tables, u32 table_stride, u32 sequence, u64 layer_offset, u32 n_kv_heads,
                  u32 kv_head, u32 dim)
        : page_base(bases), table(page_tables + (u64)sequence * table_stride),
          head_offset(layer_offset + (u64)kv_head * KV_PAGE_TOKENS * dim * sizeof(T)),
          plane_bytes((u64)n_kv_heads * KV_PAGE_TOKENS * dim * sizeof(T)), head_dim(dim) {}

    // The key of the first token of the sequence's page `index`; the other keys follow, `head_dim` values each.
    DEV T* keys(u32 index) const { return global_address<T>(page_base[table[index]] + head_offset); }
    // The values that belong to these keys.
    DEV T* values_of(T* keys) const { return (T*)((u8*)keys + plane_bytes); }
    DEV T* key(u32 position) const {
        return keys(position / KV_PAGE_TOKENS) + (u64)(position % KV_PAGE_TOKENS) * head_dim;
    }
};
