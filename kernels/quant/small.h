// Loads and decodes the types below four bits and those of tables. types.h says what a type has.
#pragma once
#include "types.h"

// A table of 16 bytes turns nibbles into codes: eight negative ones before eight others, or else all below 128.
template <u32 A, u32 B, u32 C, u32 D> DEV void look_up_nibbles(const u32 (&words)[4], i32 (&code)[8]) {
    constexpr u32x4 table = {A, B, C, D};
    UNROLL for (u32 w = 0; w < 4; w++) {
        const u32x2 both = A >> 31 != 0 ? table16_rising(words[w], table) : table16_small(words[w], table);
        code[w] = i32(both.x);
        code[w + 4] = i32(both.y);
    }
}

struct IQ4_NL {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{16, 32} : i == 1 ? PlaneSpec{2, 32} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 0;
    static constexpr bool affine = false, halves = false, negative = true;
    struct Raw {
        u32x4 q;
        u16 d;
    };
    struct View {
        const u8 *q, *d;
    };
    static DEV View view(const u8* base, u64 weights) { return {base, base + plane_offset<IQ4_NL>(weights, 1)}; }
    static DEV View from(const View& v, u32 g) { return {v.q + 16 * u64(g), v.d + 2 * u64(g)}; }
    static DEV Raw load(const View& v, u32 g) { return {plane_16(v.q, g), plane_2(v.d, g)}; }
    static DEV Group decode(const Raw& raw, u32) {
        Group group;
        const u32 words[4] = {raw.q.x, raw.q.y, raw.q.z, raw.q.w};
        // Bytes -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.
        look_up_nibbles<0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u>(words, group.code);
        group.scale[0] = group.scale[1] = f16_to_f32(f16_from_bits(raw.d));
        group.min[0] = group.min[1] = 0.0f;
        return group;
    }
};

// Nibbles of a table, under a signed byte per group and an f16 per 256, of which it takes one part in PARTS.
template <i32 OFFSET, u32 PARTS, u32 A, u32 B, u32 C, u32 D> struct TableNibbles {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{16, 32} : i == 1 ? PlaneSpec{1, 32} : i == 2 ? PlaneSpec{2, 256} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = OFFSET;
    static constexpr bool affine = false, halves = false, negative = OFFSET == 0;
    struct Raw {
        u32x4 q;
        u16 d;
        u8 scale;
    };
    struct View {
        const u8 *q, *scale, *d;
    };
    static DEV View view(const u8* base, u64 weights) {
        return {base, base + plane_offset<TableNibbles>(weights, 1), base + plane_offset<TableNibbles>(weights, 2)};
    }
    static DEV View from(const View& v, u32 g) { return {v.q + 16 * u64(g), v.scale + g, v.d + g / 4}; }
    static DEV Raw load(const View& v, u32 g) { return {plane_16(v.q, g), plane_2(v.d, g / 8), plane_1(v.scale, g)}; }
    static DEV Group decode(const Raw& raw, u32) {
        Group group;
        const u32 words[4] = {raw.q.x, raw.q.y, raw.q.z, raw.q.w};
        look_up_nibbles<A, B, C, D>(words, group.code);
        // 11 bits times 6 bits, and a power of two: exact.
        group.scale[0] = group.scale[1] = f16_to_f32(f16_from_bits(raw.d)) * (1.0f / f32(PARTS)) * f32(i8(raw.scale));
        group.min[0] = group.min[1] = 0.0f;
        return group;
    }
};
using IQ4_XS = TableNibbles<0, 1, 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u>;
// 64 plus 4 12 20 28 36 44 52 62, then 64 less them.
using IQ3_XXS = TableNibbles<64, 4, 0x5c544c44u, 0x7e746c64u, 0x242c343cu, 0x020c141cu>;
// 64 plus 1 3 5 7 9 11 13 15, then 64 less them.
using IQ3_S = TableNibbles<64, 1, 0x47454341u, 0x4f4d4b49u, 0x393b3d3fu, 0x31333537u>;

struct Q3_K {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{8, 32} : i == 1 ? PlaneSpec{4, 32} : i == 2 ? PlaneSpec{2, 32} : i == 3 ? PlaneSpec{2, 256} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 4;
    static constexpr bool affine = false, halves = true, negative = false;
    struct Raw {
        u32x2 q;
        u32 high;
        u16 scales, d;
    };
    struct View {
        const u8 *q, *high, *scales, *d;
    };
    static DEV View view(const u8* base, u64 weights) {
        return {base, base + plane_offset<Q3_K>(weights, 1), base + plane_offset<Q3_K>(weights, 2),
                base + plane_offset<Q3_K>(weights, 3)};
    }
    static DEV View from(const View& v, u32 g) { return {v.q + 8 * u64(g), v.high + 4 * u64(g), v.scales + 2 * u64(g), v.d + g / 4}; }
    static DEV Raw load(const View& v, u32 g) {
        return {plane_8(v.q, g), plane_4(v.high, g), plane_2(v.scales, g), plane_2(v.d, g / 8)};
    }
    static DEV Group decode(const Raw& raw, u32) {
        Group group;
        unpack_two_bits(raw.q, group.code);
        UNROLL for (u32 w = 0; w < 8; w++) {
            group.code[w] |= i32((w <= 2 ? raw.high << (2 - w) : raw.high >> (w - 2)) & 0x04040404u);
        }
        // 11 bits times 6 bits: exact.
        const f32 d = f16_to_f32(f16_from_bits(raw.d));
        group.scale[0] = d * f32(i8(raw.scales));
        group.scale[1] = d * f32(i8(raw.scales >> 8));
        group.min[0] = group.min[1] = 0.0f;
        return group;
    }
};

// Sizes 8, 25 and 43 as two bits and signs, under one signed byte per group, or two where HALVES, and an f16 per 256.
template <u32 FILE_TYPE, bool HALVES> struct SizesAndSigns {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{8, 32} : i == 1 ? PlaneSpec{4, 32} : i == 2 ? PlaneSpec{HALVES ? 2 : 1, 32} : i == 3 ? PlaneSpec{2, 256} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 64;
    static constexpr bool affine = false, halves = HALVES, negative = false;
    struct Raw {
        u32x2 q;
        u32 signs;
        u16 scales, d;
    };
    struct View {
        const u8 *q, *signs, *scales, *d;
    };
    static DEV View view(const u8* base, u64 weights) {
        return {base, base + plane_offset<SizesAndSigns>(weights, 1), base + plane_offset<SizesAndSigns>(weights, 2),
                base + plane_offset<SizesAndSigns>(weights, 3)};
    }
    static DEV View from(const View& v, u32 g) {
        return {v.q + 8 * u64(g), v.signs + 4 * u64(g), v.scales + (HALVES ? 2 : 1) * u64(g), v.d + g / 4};
    }
    static DEV Raw load(const View& v, u32 g) {
        return {plane_8(v.q, g), plane_4(v.signs, g), HALVES ? plane_2(v.scales, g) : u16(plane_1(v.scales, g)), plane_2(v.d, g / 8)};
    }
    static DEV Group decode(const Raw& raw, u32) {
        Group group;
        u32 words[4];
        UNROLL for (u32 w = 0; w < 4; w++) {
            const u32 size = (raw.q.x >> (2 * w) & 0x03030303u) | (raw.q.y >> (2 * w) & 0x03030303u) << 4;
            const u32 sign = (raw.signs >> w & 0x01010101u) << 2 | (raw.signs >> (w + 4) & 0x01010101u) << 6;
            words[w] = size | sign;
        }
        // 64 plus 8 25 43 0, then 64 less them.
        look_up_nibbles<0x406b5948u, 0x40152738u, 0, 0>(words, group.code);
        // 11 bits times 5 bits, and an eighth: exact.
        const f32 d = f16_to_f32(f16_from_bits(raw.d)) * 0.125f;
        group.scale[0] = d * f32(u8(raw.scales));
        group.scale[1] = HALVES ? d * f32(u8(raw.scales >> 8)) : group.scale[0];
        group.min[0] = group.min[1] = 0.0f;
        return group;
    }
};
using IQ2_XXS = SizesAndSigns<16, false>;
using IQ2_XS = SizesAndSigns<17, true>;
using IQ2_S = SizesAndSigns<22, true>;

struct Q2_K {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{8, 32} : i == 1 ? PlaneSpec{2, 32} : i == 2 ? PlaneSpec{4, 256} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 0;
    static constexpr bool affine = true, halves = true, negative = false;
    struct Raw {
        u32x2 q;
        u32 dm;
        u16 scales;
    };
    struct View {
        const u8 *q, *scales, *dm;
    };
    static DEV View view(const u8* base, u64 weights) {
        return {base, base + plane_offset<Q2_K>(weights, 1), base + plane_offset<Q2_K>(weights, 2)};
    }
    static DEV View from(const View& v, u32 g) { return {v.q + 8 * u64(g), v.scales + 2 * u64(g), v.dm + g / 2}; }
    static DEV Raw load(const View& v, u32 g) { return {plane_8(v.q, g), plane_4(v.dm, g / 8), plane_2(v.scales, g)}; }
    static DEV Group decode(const Raw& raw, u32) {
        Group group;
        unpack_two_bits(raw.q, group.code);
        // 11 bits times 4 bits: exact.
        const f32x2 d = unpack_f16x2(raw.dm);
        UNROLL for (u32 h = 0; h < 2; h++) {
            group.scale[h] = d.x * f32(raw.scales >> (8 * h) & 15);
            group.min[h] = -(d.y * f32(raw.scales >> (8 * h + 4) & 15));
        }
        return group;
    }
};

// -1, 0 and 1 under an f16 per 256.
template <u32 FILE_TYPE> struct Ternary {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{8, 32} : i == 1 ? PlaneSpec{2, 256} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 1;
    static constexpr bool affine = false, halves = false, negative = false;
    struct Raw {
        u32x2 q;
        u16 d;
    };
    struct View {
        const u8 *q, *d;
    };
    static DEV View view(const u8* base, u64 weights) { return {base, base + plane_offset<Ternary>(weights, 1)}; }
    static DEV View from(const View& v, u32 g) { return {v.q + 8 * u64(g), v.d + g / 4}; }
    static DEV Raw load(const View& v, u32 g) { return {plane_8(v.q, g), plane_2(v.d, g / 8)}; }
    static DEV Group decode(const Raw& raw, u32) {
        Group group;
        unpack_two_bits(raw.q, group.code);
        group.scale[0] = group.scale[1] = f16_to_f32(f16_from_bits(raw.d));
        group.min[0] = group.min[1] = 0.0f;
        return group;
    }
};
using TQ1_0 = Ternary<34>;
using TQ2_0 = Ternary<35>;

// Codes of IQ1_S and IQ1_M: eight times -1, 0 or 1, plus one, or minus one for the eight weights whose bit of `below` is set; all
// 9 too large.
DEV void unpack_eighths(const u32x2& q, u32 below, i32 (&code)[8]) {
    unpack_two_bits(q, code);
    UNROLL for (u32 w = 0; w < 8; w++) code[w] = code[w] << 3 | i32((below >> (w / 2) & 1) != 0 ? 0u : 0x02020202u);
}

struct IQ1_S {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{8, 32} : i == 1 ? PlaneSpec{1, 32} : i == 2 ? PlaneSpec{2, 256} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 9;
    static constexpr bool affine = false, halves = false, negative = false;
    struct Raw {
        u32x2 q;
        u16 d;
        u8 scale;
    };
    struct View {
        const u8 *q, *scale, *d;
    };
    static DEV View view(const u8* base, u64 weights) {
        return {base, base + plane_offset<IQ1_S>(weights, 1), base + plane_offset<IQ1_S>(weights, 2)};
    }
    static DEV View from(const View& v, u32 g) { return {v.q + 8 * u64(g), v.scale + g, v.d + g / 4}; }
    static DEV Raw load(const View& v, u32 g) { return {plane_8(v.q, g), plane_2(v.d, g / 8), plane_1(v.scale, g)}; }
    static DEV Group decode(const Raw& raw, u32) {
        Group group;
        unpack_eighths(raw.q, raw.scale >> 4 != 0 ? 15u : 0u, group.code);
        // 11 bits times 4 bits, and an eighth: exact.
        group.scale[0] = group.scale[1] = f16_to_f32(f16_from_bits(raw.d)) * 0.125f * f32(raw.scale & 15);
        group.min[0] = group.min[1] = 0.0f;
        return group;
    }
};

struct IQ1_M {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{8, 32} : i == 1 ? PlaneSpec{2, 32} : i == 2 ? PlaneSpec{2, 256} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 9;
    static constexpr bool affine = false, halves = true, negative = false;
    struct Raw {
        u32x2 q;
        u16 scales, d;
    };
    struct View {
        const u8 *q, *scales, *d;
    };
    static DEV View view(const u8* base, u64 weights) {
        return {base, base + plane_offset<IQ1_M>(weights, 1), base + plane_offset<IQ1_M>(weights, 2)};
    }
    static DEV View from(const View& v, u32 g) { return {v.q + 8 * u64(g), v.scales + 2 * u64(g), v.d + g / 4}; }
    static DEV Raw load(const View& v, u32 g) { return {plane_8(v.q, g), plane_2(v.scales, g), plane_2(v.d, g / 8)}; }
    static DEV Group decode(const Raw& raw, u32) {
        Group group;
        unpack_eighths(raw.q, u32(raw.scales >> 8), group.code);
        const f32 d = f16_to_f32(f16_from_bits(raw.d)) * 0.125f;
        group.scale[0] = d * f32(raw.scales & 15);
        group.scale[1] = d * f32(raw.scales >> 4 & 15);
        group.min[0] = group.min[1] = 0.0f;
        return group;
    }
};
