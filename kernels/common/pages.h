// KV pages: the place of a token's keys and values.
//
// A page holds KV_PAGE_TOKENS tokens of one sequence for all layers: [layer][k | v][kv_head][token][head_dim], f16, f32 or i8.
// For i8, the tokens' codes of a KV head are followed by their scales, f16[token][head_dim / KV_GROUP]: a value is code * scale.
// page_base[page] is a page's address; page_tables holds `table_stride` page numbers for each sequence of the step, entry p
// its positions from p * KV_PAGE_TOKENS on. Pages are 16-byte aligned.
#pragma once
#include "../prelude/prelude.h"

constexpr u32 KV_PAGE_TOKENS = 32;
// As row_seq: a padding row of a step. It reads and writes no page; its results are 0.
constexpr u32 NO_SEQUENCE = 0xffffffffu;

// Values that share a scale in pages of 8-bit codes, and the most such groups of a head.
constexpr u32 KV_GROUP = 32, KV_GROUPS_MAX = 8;

template <class T> constexpr bool IS_CODED = false;
template <> constexpr bool IS_CODED<i8> = true;

DEV f32 from_element(f16 v) { return f16_to_f32(v); }
DEV f32 from_element(f32 v) { return v; }
DEV void to_element(f32 v, f16& out) { out = f32_to_f16(v); }
DEV void to_element(f32 v, f32& out) { out = v; }

// Bytes of a KV head's keys, or of its values, in a page.
template <class T> DEV u64 kv_plane_bytes(u32 dim) {
    return (u64)KV_PAGE_TOKENS * (dim * sizeof(T) + (IS_CODED<T> ? dim / KV_GROUP * sizeof(f16) : 0));
}

// The scales of a token's codes. `codes`: where the codes of the page's first token are.
DEV f16* scales_of(const i8* codes, u32 token, u32 dim) {
    return (f16*)(codes + KV_PAGE_TOKENS * dim) + token * (dim / KV_GROUP);
}

// Four codes as f32, without their scale.
DEV void from_codes(u32 codes, f32 (&x)[4]) {
    // As bytes from 0 to 255, which become f16 at once.
    const u32 shifted = codes ^ 0x80808080u;
    const f32x2 low = unpack_f16x2(bytes_f16x2<128>(shifted, 0)), high = unpack_f16x2(bytes_f16x2<128>(shifted, 2));
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}

// How a group of values becomes codes: the greatest magnitude has the code 127 or -127.
struct KvScale {
    f16 scale;
    f32 inverse;

    // `most`: bits of the group's greatest magnitude. If a value is not finite, the scale is NaN: an overflow is not hidden.
    DEV static KvScale of(u32 most) {
        const f16 scale = most < 0x7f800000u ? f32_to_f16(as_f32(most) / 127.0f) : f16_from_bits(0x7e00);
        const f32 back = f16_to_f32(scale);
        return {scale, back > 0.0f ? 1.0f / back : 0.0f};
    }
    // A scale that is rounded down leaves values above 127 of it.
    DEV static i8 code(f32 v, f32 inverse) {
        return inverse > 0.0f ? (i8)max_f32(-127.0f, min_f32(127.0f, round_even_f32(v * inverse))) : (i8)0;
    }
};

// A token's key or value of a head.
template <class T> struct Token {
    const T* values;
    DEV Token past(u64 bytes) const { return {(const T*)((const u8*)values + bytes)}; }
};
template <> struct Token<i8> {
    const i8* values;
    const f16* scales;
    DEV Token past(u64 bytes) const { return {values + bytes, (const f16*)((const u8*)scales + bytes)}; }
};

// A value of a page. `plane`: where a head's keys, or its values, begin. `i`: number of the value among them.
template <class T> DEV f32 value_of(const T* plane, u32 i, u32 dim) {
    if constexpr (IS_CODED<T>) return (f32)plane[i] * f16_to_f32(scales_of(plane, i / dim, dim)[i % dim / KV_GROUP]);
    else return from_element(plane[i]);
}

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
          head_offset(layer_offset + kv_head * kv_plane_bytes<T>(dim)), plane_bytes(n_kv_heads * kv_plane_bytes<T>(dim)),
          head_dim(dim) {}

    // The key of the first token of the sequence's page `index`; the other keys follow, `head_dim` values each.
    DEV T* keys(u32 index) const { return global_address<T>(page_base[table[index]] + head_offset); }
    // The values that belong to these keys.
    DEV T* values_of(T* keys) const { return (T*)((u8*)keys + plane_bytes); }
    DEV T* key(u32 position) const {
        return keys(position / KV_PAGE_TOKENS) + (u64)(position % KV_PAGE_TOKENS) * head_dim;
    }
    // The key of a position, to read.
    DEV Token<T> key_token(u32 position) const {
        if constexpr (IS_CODED<T>) {
            T* first = keys(position / KV_PAGE_TOKENS);
            const u32 token = position % KV_PAGE_TOKENS;
            return {first + (u64)token * head_dim, scales_of(first, token, head_dim)};
        } else {
            return {key(position)};
        }
    }
};
