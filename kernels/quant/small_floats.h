// Loads and decodes floats of four and six bits. types.h says what a type has.
#pragma once
#include "types.h"

// The doubled values of a word's 4-bit floats, 64 too large: 64 plus 0 1 2 3 4 6 8 12, then 64 less them.
DEV void unpack_e2m1(const u32x4& q, i32 (&code)[8]) {
    constexpr u32x4 table = {0x43424140u, 0x4c484644u, 0x3d3e3f40u, 0x34383a3cu};
    const u32 words[4] = {q.x, q.y, q.z, q.w};
    UNROLL for (u32 w = 0; w < 4; w++) {
        const u32x2 both = table16_small(words[w], table);
        code[w] = i32(both.x);
        code[w + 4] = i32(both.y);
    }
}

// 4-bit floats under one power of two. Codes are the doubled values, 64 too large; the scale is half the power.
struct MXFP4 {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{16, 32} : i == 1 ? PlaneSpec{1, 32} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 64;
    static constexpr bool affine = false, halves = false, negative = false;
    struct Raw {
        u32x4 q;
        u32 e; // a byte: as u8 it would be masked as soon as it is loaded, and AMD's compiler waits for it there
    };
    struct View {
        const u8 *q, *e;
    };
    static DEV View view(const u8* base, u64 weights) { return {base, base + plane_offset<MXFP4>(weights, 1)}; }
    static DEV View from(const View& v, u32 g) { return {v.q + 16 * u64(g), v.e + g}; }
    static DEV Raw load(const View& v, u32 g) { return {plane_16(v.q, g), plane_1(v.e, g)}; }
    static DEV Group decode(const Raw& raw, u32) {
        Group group;
        unpack_e2m1(raw.q, group.code);
        group.scale[0] = group.scale[1] = e8m0_half_to_f32(u8(raw.e));
        group.min[0] = group.min[1] = 0.0f;
        return group;
    }
};

// 4-bit floats under an 8-bit float for each half of a group. Codes as MXFP4's.
struct NVFP4 {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{16, 32} : i == 1 ? PlaneSpec{2, 32} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 64;
    static constexpr bool affine = false, halves = true, negative = false;
    struct Raw {
        u32x4 q;
        u16 scales;
    };
    struct View {
        const u8 *q, *scales;
    };
    static DEV View view(const u8* base, u64 weights) { return {base, base + plane_offset<NVFP4>(weights, 1)}; }
    static DEV View from(const View& v, u32 g) { return {v.q + 16 * u64(g), v.scales + 2 * u64(g)}; }
    static DEV Raw load(const View& v, u32 g) { return {plane_16(v.q, g), plane_2(v.scales, g)}; }
    static DEV Group decode(const Raw& raw, u32) {
        Group group;
        unpack_e2m1(raw.q, group.code);
        group.scale[0] = ue4m3_half_to_f32(u8(raw.scales));
        group.scale[1] = ue4m3_half_to_f32(u8(raw.scales >> 8));
        group.min[0] = group.min[1] = 0.0f;
        return group;
    }
};

// The fifth bits and the signs of two words' floats, as bytes of all ones, and of 127, or none. The words are word w of the lower
// half of a group and of the upper one; `upper` has both halves' bits.
struct UpperBits {
    u32 fifth[2], sign[2];
    DEV UpperBits(const u32x2& upper, u32 w) {
        const u32 halves[2] = {upper.x >> (2 * w), upper.y >> (2 * w)};
        UNROLL for (u32 h = 0; h < 2; h++) {
            const u32 bits = halves[h] & 0x01010101u, signs = halves[h] >> 1 & 0x01010101u;
            fifth[h] = (bits << 8) - bits;
            sign[h] = (signs << 7) - signs;
        }
    }
    // 64 plus or minus each byte of `size`, at most 64. A byte's complement to 127 is 64 - size + 63; no byte borrows.
    DEV i32 code(u32 size, u32 h) const { return i32((size ^ sign[h]) + 0x40404040u - sign[h]); }
};

// 6-bit floats under one power of two. Codes are multiples of the least value, in two digits for E3M2.
template <bool E3M2> struct MXFP6 {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{16, 32} : i == 1 ? PlaneSpec{8, 32} : i == 2 ? PlaneSpec{1, 32} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 64;
    static constexpr bool affine = false, halves = false, negative = false;
    struct Raw {
        u32x4 q;
        u32x2 upper;
        u32 e; // a byte: as u8 it would be masked as soon as it is loaded, and AMD's compiler waits for it there
    };
    struct View {
        const u8 *q, *upper, *e;
    };
    static DEV View view(const u8* base, u64 weights) {
        return {base, base + plane_offset<MXFP6>(weights, 1), base + plane_offset<MXFP6>(weights, 2)};
    }
    static DEV View from(const View& v, u32 g) { return {v.q + 16 * u64(g), v.upper + 8 * u64(g), v.e + g}; }
    static DEV Raw load(const View& v, u32 g) { return {plane_16(v.q, g), plane_8(v.upper, g), plane_1(v.e, g)}; }
    static DEV Group decode(const Raw& raw, u32) {
        Group group;
        const u32 words[4] = {raw.q.x, raw.q.y, raw.q.z, raw.q.w};
        UNROLL for (u32 w = 0; w < 4; w++) {
            const UpperBits upper(raw.upper, w);
            if constexpr (E3M2) {
                // Without the fifth bit 0 to 7 and 8 10 12 14 16 20 24 28 sixteenths; with it halves: 4 to 7, 8 10 12 14, 16 and so on.
                constexpr u32x4 low = {0x03020100u, 0x07060504u, 0x0e0c0a08u, 0x1c181410u};
                constexpr u32x4 high = {0x07060504u, 0x0e0c0a08u, 0x1c181410u, 0x38302820u};
                const u32x2 lower = table16_small(words[w], low), higher = table16_small(words[w], high);
                group.code[w] = upper.code(lower.x & ~upper.fifth[0], 0);
                group.code[w + 4] = upper.code(lower.y & ~upper.fifth[1], 1);
                group.high[w] = upper.code(higher.x & upper.fifth[0], 0);
                group.high[w + 4] = upper.code(higher.y & upper.fifth[1], 1);
            } else {
                // Without the fifth bit 0 to 15 eighths; with it 16 18 20 and so on to 30, then 32 36 40 and so on to 60.
                constexpr u32x4 table = {0x16141210u, 0x1e1c1a18u, 0x2c282420u, 0x3c383430u};
                const u32x2 large = table16_small(words[w], table);
                const u32 low = words[w] & 0x0f0f0f0fu, high = words[w] >> 4 & 0x0f0f0f0fu;
                group.code[w] = upper.code((large.x & upper.fifth[0]) | (low & ~upper.fifth[0]), 0);
                group.code[w + 4] = upper.code((large.y & upper.fifth[1]) | (high & ~upper.fifth[1]), 1);
            }
        }
        group.scale[0] = group.scale[1] = e8m0_half_to_f32(u8(raw.e)) * (E3M2 ? 0.125f : 0.25f);
        group.min[0] = group.min[1] = 0.0f;
        return group;
    }
    // The same group of E3M2 with one byte a weight: sign, two zeros, the other five bits. It is the upper byte of an f16 that is 2^-12
    // of the weight, to the bit.
    static DEV Group decode_floats(const Raw& raw) {
        Group group;
        unpack_nibbles(raw.q, group.code);
        UNROLL for (u32 w = 0; w < 4; w++) {
            const u32 halves[2] = {raw.upper.x >> (2 * w), raw.upper.y >> (2 * w)};
            UNROLL for (u32 h = 0; h < 2; h++) {
                group.code[w + 4 * h] |= i32((halves[h] & 0x01010101u) << 4 | (halves[h] & 0x02020202u) << 6);
            }
        }
        group.scale[0] = group.scale[1] = e8m0_half_to_f32(u8(raw.e)) * 2.0f;
        group.min[0] = group.min[1] = 0.0f;
        return group;
    }
    // Weights `first` and the next of such a word before scaling, in f16: at most 28. Under a power of two above 2^16 those that f16
    // could still hold become too small.
    static constexpr f32 most = 28.0f;
    static DEV u32 floats_f16x2(u32 word, u32 first) {
        const u32 floats = byte_u8(word, first) << 8 | byte_u8(word, first + 1) << 24;
        return fma_f16x2(floats, 0x6c006c00u, 0); // 2^12
    }
};
using MXFP6_E2M3 = MXFP6<false>;
using MXFP6_E3M2 = MXFP6<true>;
template <> inline constexpr bool HAS_HIGH<MXFP6_E3M2> = true;
