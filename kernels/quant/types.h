// Loads and decodes each quantised type's planes, group by group.
//
// A type T names its planes, the offset of its codes (quant/planes.h has the formula) and its flags:
//   affine            a group has minimums; otherwise `min` is 0
//   halves            each half of a group has its own scale and minimum; otherwise both are equal
//   negative          codes are signed bytes; otherwise none is below 0
// HAS_HIGH<T> says that codes have two digits (quant/planes.h).
// and has
//   Raw               one group in a lane's registers between load and use
//   View              addresses of the planes of a tensor, from some group on
//   view(base, n)     the view of a tensor of n weights at `base`
//   from(view, g)     the view from group g on, where a row begins
//   load(view, g)     loads group g of the view: loads independent of each other, 16 bytes where there are 16 to load
//   decode(raw, g)    Raw -> Group; values equal the file format's to the bit when computed as scale * (code - offset) + min.
//                     g is the group's number, or any number with the same remainder by 8
// Groups are counted through the whole tensor: row * (cols / 32) + group of the row.
// small.h and small_floats.h have more types.
#pragma once
#include "planes.h"

struct Q8_0 {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{32, 32} : i == 1 ? PlaneSpec{2, 32} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 0;
    static constexpr bool affine = false, halves = false, negative = true;
    struct Raw {
        u32x4 q[2];
        u16 d;
    };
    struct View {
        const u8 *q, *d;
    };
    static DEV View view(const u8* base, u64 weights) { return {base, base + plane_offset<Q8_0>(weights, 1)}; }
    static DEV View from(const View& v, u32 g) { return {v.q + 32 * u64(g), v.d + 2 * u64(g)}; }
    static DEV Raw load(const View& v, u32 g) {
        return {{plane_16(v.q, 2 * u64(g)), plane_16(v.q, 2 * u64(g) + 1)}, plane_2(v.d, g)};
    }
    static DEV Group decode(const Raw& raw, u32) {
        const f32 d = f16_to_f32(f16_from_bits(raw.d));
        return {{i32(raw.q[0].x), i32(raw.q[0].y), i32(raw.q[0].z), i32(raw.q[0].w), i32(raw.q[1].x), i32(raw.q[1].y),
                 i32(raw.q[1].z), i32(raw.q[1].w)},
                {d, d},
                {0.0f, 0.0f},
                {}};
    }
};

struct Q4_0 {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{16, 32} : i == 1 ? PlaneSpec{2, 32} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 8;
    static constexpr bool affine = false, halves = false, negative = false;
    struct Raw {
        u32x4 q;
        u16 d;
    };
    struct View {
        const u8 *q, *d;
    };
    static DEV View view(const u8* base, u64 weights) { return {base, base + plane_offset<Q4_0>(weights, 1)}; }
    static DEV View from(const View& v, u32 g) { return {v.q + 16 * u64(g), v.d + 2 * u64(g)}; }
    static DEV Raw load(const View& v, u32 g) { return {plane_16(v.q, g), plane_2(v.d, g)}; }
    static DEV Group decode(const Raw& raw, u32) {
        Group group;
        unpack_nibbles(raw.q, group.code);
        group.scale[0] = group.scale[1] = f16_to_f32(f16_from_bits(raw.d));
        group.min[0] = group.min[1] = 0.0f;
        return group;
    }
};

struct Q4_1 {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{16, 32} : i == 1 ? PlaneSpec{4, 32} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 0;
    static constexpr bool affine = true, halves = false, negative = false;
    struct Raw {
        u32x4 q;
        u32 dm;
    };
    struct View {
        const u8 *q, *dm;
    };
    static DEV View view(const u8* base, u64 weights) { return {base, base + plane_offset<Q4_1>(weights, 1)}; }
    static DEV View from(const View& v, u32 g) { return {v.q + 16 * u64(g), v.dm + 4 * u64(g)}; }
    static DEV Raw load(const View& v, u32 g) { return {plane_16(v.q, g), plane_4(v.dm, g)}; }
    static DEV Group decode(const Raw& raw, u32) {
        Group group;
        unpack_nibbles(raw.q, group.code);
        const f32x2 dm = unpack_f16x2(raw.dm);
        group.scale[0] = group.scale[1] = dm.x;
        group.min[0] = group.min[1] = dm.y;
        return group;
    }
};

struct Q5_0 {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{16, 32} : i == 1 ? PlaneSpec{4, 32} : i == 2 ? PlaneSpec{2, 32} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 16;
    static constexpr bool affine = false, halves = false, negative = false;
    struct Raw {
        u32x4 q;
        u32 high;
        u16 d;
    };
    struct View {
        const u8 *q, *high, *d;
    };
    static DEV View view(const u8* base, u64 weights) {
        return {base, base + plane_offset<Q5_0>(weights, 1), base + plane_offset<Q5_0>(weights, 2)};
    }
    static DEV View from(const View& v, u32 g) { return {v.q + 16 * u64(g), v.high + 4 * u64(g), v.d + 2 * u64(g)}; }
    static DEV Raw load(const View& v, u32 g) { return {plane_16(v.q, g), plane_4(v.high, g), plane_2(v.d, g)}; }
    static DEV Group decode(const Raw& raw, u32) {
        Group group;
        unpack_nibbles(raw.q, group.code);
        add_fifth_bits(raw.high, group.code);
        group.scale[0] = group.scale[1] = f16_to_f32(f16_from_bits(raw.d));
        group.min[0] = group.min[1] = 0.0f;
        return group;
    }
};

struct Q5_1 {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{16, 32} : i == 1 ? PlaneSpec{4, 32} : i == 2 ? PlaneSpec{4, 32} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 0;
    static constexpr bool affine = true, halves = false, negative = false;
    struct Raw {
        u32x4 q;
        u32 high, dm;
    };
    struct View {
        const u8 *q, *high, *dm;
    };
    static DEV View view(const u8* base, u64 weights) {
        return {base, base + plane_offset<Q5_1>(weights, 1), base + plane_offset<Q5_1>(weights, 2)};
    }
    static DEV View from(const View& v, u32 g) { return {v.q + 16 * u64(g), v.high + 4 * u64(g), v.dm + 4 * u64(g)}; }
    static DEV Raw load(const View& v, u32 g) { return {plane_16(v.q, g), plane_4(v.high, g), plane_4(v.dm, g)}; }
    static DEV Group decode(const Raw& raw, u32) {
        Group group;
        unpack_nibbles(raw.q, group.code);
        add_fifth_bits(raw.high, group.code);
        const f32x2 dm = unpack_f16x2(raw.dm);
        group.scale[0] = group.scale[1] = dm.x;
        group.min[0] = group.min[1] = dm.y;
        return group;
    }
};

struct Q4_K {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{16, 32} : i == 1 ? PlaneSpec{16, 256} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 0;
    static constexpr bool affine = true, halves = false, negative = false;
    struct Raw {
        u32x4 q, header;
    };
    struct View {
        const u8 *q, *header;
    };
    static DEV View view(const u8* base, u64 weights) { return {base, base + plane_offset<Q4_K>(weights, 1)}; }
    static DEV View from(const View& v, u32 g) { return {v.q + 16 * u64(g), v.header + 2 * u64(g)}; }
    static DEV Raw load(const View& v, u32 g) { return {plane_16(v.q, g), plane_16(v.header, g / 8)}; }
    static DEV Group decode(const Raw& raw, u32 g) {
        Group group;
        unpack_nibbles(raw.q, group.code);
        const u32 packed = scale_and_min(raw.header, g % 8);
        // An 11-bit significand times 6 bits: both products are exact.
        const f32x2 d = unpack_f16x2(raw.header.x);
        group.scale[0] = group.scale[1] = d.x * f32(packed & 63);
        group.min[0] = group.min[1] = -(d.y * f32(packed >> 6));
        return group;
    }
};

struct Q5_K {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{16, 32} : i == 1 ? PlaneSpec{4, 32} : i == 2 ? PlaneSpec{16, 256} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 0;
    static constexpr bool affine = true, halves = false, negative = false;
    struct Raw {
        u32x4 q, header;
        u32 high;
    };
    struct View {
        const u8 *q, *high, *header;
    };
    static DEV View view(const u8* base, u64 weights) {
        return {base, base + plane_offset<Q5_K>(weights, 1), base + plane_offset<Q5_K>(weights, 2)};
    }
    static DEV View from(const View& v, u32 g) { return {v.q + 16 * u64(g), v.high + 4 * u64(g), v.header + 2 * u64(g)}; }
    static DEV Raw load(const View& v, u32 g) { return {plane_16(v.q, g), plane_16(v.header, g / 8), plane_4(v.high, g)}; }
    static DEV Group decode(const Raw& raw, u32 g) {
        Group group = Q4_K::decode({raw.q, raw.header}, g);
        add_fifth_bits(raw.high, group.code);
        return group;
    }
};

struct Q6_K {
    static DEV constexpr PlaneSpec plane(u32 i) {
        return i == 0 ? PlaneSpec{16, 32} : i == 1 ? PlaneSpec{8, 32} : i == 2 ? PlaneSpec{2, 32} : i == 3 ? PlaneSpec{2, 256} : PlaneSpec{0, 32};
    }
    static constexpr i32 offset = 32;
    static constexpr bool affine = false, halves = true, negative = false;
    struct Raw {
        u32x4 q;
        u32x2 high;
        u16 scales, d;
    };
    struct View {
        const u8 *q, *high, *scales, *d;
    };
    static DEV View view(const u8* base, u64 weights) {
        return {base, base + plane_offset<Q6_K>(weights, 1), base + plane_offset<Q6_K>(weights, 2),
                base + plane_offset<Q6_K>(weights, 3)};
    }
    static DEV View from(const View& v, u32 g) { return {v.q + 16 * u64(g), v.high + 8 * u64(g), v.scales + 2 * u64(g), v.d + g / 4}; }
    static DEV Raw load(const View& v, u32 g) {
        return {plane_16(v.q, g), plane_8(v.high, g), plane_2(v.scales, g), plane_2(v.d, g / 8)};
    }
    static DEV Group decode(const Raw& raw, u32) {
        Group group;
        unpack_nibbles(raw.q, group.code);
        UNROLL for (u32 w = 0; w < 4; w++) {
            group.code[w] |= i32((w <= 2 ? raw.high.x << (4 - 2 * w) : raw.high.x >> (2 * w - 4)) & 0x30303030u);
            group.code[w + 4] |= i32((w <= 2 ? raw.high.y << (4 - 2 * w) : raw.high.y >> (2 * w - 4)) & 0x30303030u);
        }
        // 11 bits times 7 bits: exact.
        const f32 d = f16_to_f32(f16_from_bits(raw.d));
        group.scale[0] = d * f32(i8(raw.scales));
        group.scale[1] = d * f32(i8(raw.scales >> 8));
        group.min[0] = group.min[1] = 0.0f;
        return group;
    }
};
