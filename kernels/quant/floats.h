// Float weights: rows as in the file, each padded with zeros to a multiple of 16 bytes, so that every lane loads 16 bytes.
//
// A type T has `values` per 16-byte chunk, the Raw of a chunk and
//   view(base, n), from(view, c)   as in types.h
//   load(view, c)     chunk c, counted through the whole tensor
//   decode(raw, out)  its values as f32, exact
#pragma once
#include "planes.h"

struct F32 {
    static constexpr u32 values = 4;
    static constexpr u32 bytes = 4;
    using Raw = u32x4;
    using View = const u8*;
    static DEV View view(const u8* base, u64) { return base; }
    static DEV View from(View base, u32 chunk) { return base + 16 * u64(chunk); }
    static DEV Raw load(View base, u32 chunk) { return plane_16(base, chunk); }
    static DEV void decode(const Raw& raw, f32 (&out)[values]) {
        out[0] = as_f32(raw.x);
        out[1] = as_f32(raw.y);
        out[2] = as_f32(raw.z);
        out[3] = as_f32(raw.w);
    }
};

struct F16 {
    static constexpr u32 values = 8;
    static constexpr u32 bytes = 2;
    using Raw = u32x4;
    using View = const u8*;
    static DEV View view(const u8* base, u64) { return base; }
    static DEV View from(View base, u32 chunk) { return base + 16 * u64(chunk); }
    static DEV Raw load(View base, u32 chunk) { return plane_16(base, chunk); }
    static DEV void decode(const Raw& raw, f32 (&out)[values]) {
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
        UNROLL for (u32 w = 0; w < 4; w++) {
            const f32x2 pair = unpack_f16x2(words[w]);
            out[2 * w] = pair.x;
            out[2 * w + 1] = pair.y;
        }
    }
};

struct BF16 {
    static constexpr u32 values = 8;
    static constexpr u32 bytes = 2;
    using Raw = u32x4;
    using View = const u8*;
    static DEV View view(const u8* base, u64) { return base; }
    static DEV View from(View base, u32 chunk) { return base + 16 * u64(chunk); }
    static DEV Raw load(View base, u32 chunk) { return plane_16(base, chunk); }
    static DEV void decode(const Raw& raw, f32 (&out)[values]) {
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
        UNROLL for (u32 w = 0; w < 4; w++) {
            const f32x2 pair = unpack_bf16x2(words[w]);
            out[2 * w] = pair.x;
            out[2 * w + 1] = pair.y;
        }
    }
};

// Two weights of F16 or BF16, in f16.
template <class T> DEV u32 halves_of(u32 pair);
template <> DEV u32 halves_of<F16>(u32 pair) { return pair; }
template <> DEV u32 halves_of<BF16>(u32 pair) {
    const f32x2 both = unpack_bf16x2(pair);
    return pack_f16x2(within_f16(both.x), within_f16(both.y));
}

// 16-byte chunks of a row of `cols` weights.
template <class T>
DEV u32 row_chunks(u32 cols) {
    return (cols + T::values - 1) / T::values;
}

template <class T> inline constexpr bool IS_FLOAT = false;
template <> inline constexpr bool IS_FLOAT<F32> = true;
template <> inline constexpr bool IS_FLOAT<F16> = true;
template <> inline constexpr bool IS_FLOAT<BF16> = true;
