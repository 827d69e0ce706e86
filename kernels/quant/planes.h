// The layout of weight tensors on the device.
//
// Planar form holds the same bits as the file, but each kind of number in a plane of its own: first the quant plane, then the
// side planes, each starting at a multiple of 256 bytes. Within a plane, entries follow the rows of the matrix. Blocks of a
// file are 17 to 210 bytes long. A plane's entries are 1, 2, 4, 8 or 16 bytes and aligned, so that a lane loads its part of a
// row 16 bytes at a time, and loads headers beside codes, not after them.
//
// A *group* is 32 consecutive weights of a row, the weights that are multiplied under one activation scale. Planes by type:
//
// | type        | quant plane, per group | side planes                                                                  |
// |-------------|------------------------|------------------------------------------------------------------------------|
// | Q8_0        | 32 B codes             | f16 d per group                                                              |
// | Q4_0        | 16 B nibbles           | f16 d per group                                                              |
// | Q4_1        | 16 B nibbles           | f16 (d, m) per group                                                         |
// | Q5_0        | 16 B nibbles           | 4 B fifth bits per group; f16 d per group                                    |
// | Q5_1        | 16 B nibbles           | 4 B fifth bits per group; f16 (d, m) per group                               |
// | MXFP4       | 16 B nibbles           | e8m0 byte per group                                                          |
// | MXFP6_E2M3 MXFP6_E3M2 | 16 B nibbles | 8 B upper bits per group; e8m0 byte per group                                |
// | NVFP4       | 16 B nibbles           | 2 B per group: e4m3 byte of each half                                        |
// | Q4_K        | 16 B nibbles           | 16 B header per 256: f16 (d, dmin), then 8 x 12 bits: scale, minimum << 6    |
// | Q5_K        | 16 B nibbles           | 4 B fifth bits per group; header as Q4_K                                     |
// | Q6_K        | 16 B nibbles           | 8 B upper bits per group; i8 scale x 2 per group; f16 d per 256              |
// | IQ4_NL      | 16 B nibbles           | f16 d per group                                                              |
// | IQ4_XS      | 16 B nibbles           | i8 scale per group; f16 d per 256                                            |
// | IQ3_XXS IQ3_S | as IQ4_XS            | as IQ4_XS: scale 2 sc + 1                                                    |
// | Q3_K        | 8 B lower bits         | 4 B third bits per group; i8 scale x 2 per group; f16 d per 256              |
// | IQ2_XXS     | 8 B sizes              | 4 B signs per group; i8 scale per group; f16 d per 256                       |
// | IQ2_XS IQ2_S| 8 B sizes              | 4 B signs per group; i8 scale x 2 per group; f16 d per 256                   |
// | Q2_K        | 8 B codes              | (scale, minimum << 4) x 2 per group; f16 (d, dmin) per 256                   |
// | IQ1_S       | 8 B codes              | scale, below << 4 per group; f16 d per 256                                   |
// | IQ1_M       | 8 B codes              | 16 bits per group: scale x 2, four of below; f16 d per 256                   |
// | TQ1_0 TQ2_0 | 8 B codes              | f16 d per 256                                                                |
// | F32 F16 BF16| as in the file, each row padded with zeros to a multiple of 16 bytes                                  |
//
// Nibbles: byte i of a group holds weight i (low) and weight i + 16 (high), whatever the file's order. Upper bits: bit 8b + w
// of the 4 bytes of Q5 is the fifth bit of weight 4w + b; bits 8b + 2w, 8b + 2w + 1 of word h of the 8 bytes of Q6_K are the
// upper bits of weight 16h + 4w + b. So one shift and one mask give word w of four codes its upper bits.
//
// The 8 bytes of two bits per weight have the order of Q6_K's upper bits, 4 bytes of one bit that of Q5's.
//
// A file of the IQ types has indices of codebooks (quant/grids.h). Here they are looked up once, when the file is repacked: an
// index in the loop of a product would wait for memory twice. So weights take more room than in the file: IQ3 1.2 to 1.4 times,
// IQ1 1.5, IQ2_S 1.4, IQ2_XS 1.5, IQ2_XXS 1.6 times; TQ1_0 takes 1.2 times.
//
// src/backend/hip/kernels/matmul/planes.rs computes the same offsets; a test compares the two.
#pragma once
#include "../prelude/prelude.h"

// Entry size of one of up to four planes: `bytes` per `per` weights; 0 bytes: the type has no such plane.
struct PlaneSpec {
    u32 bytes;
    u32 per;
};

// Byte offset of plane `index` of a tensor of `weights` values; of index 4: the tensor's size.
template <class T>
DEV u64 plane_offset(u64 weights, u32 index) {
    u64 at = 0;
    UNROLL for (u32 i = 0; i < 4; i++) {
        const PlaneSpec plane = T::plane(i);
        if (i < index) { at += (weights / plane.per * plane.bytes + 255) & ~u64(255); }
    }
    return at;
}

// A decoded group: eight words of four int8 codes, scales and minimum. Weight 4w + b is byte b of code[w].
// Value = scale[i / 16] * (code - T::offset) + min[i / 16], where min is 0 unless T::affine, and both are equal unless T::halves.
// Codes past a byte have two digits: for code - T::offset then stands (code - T::offset) + DIGIT * (high - T::offset).
struct Group {
    i32 code[8];
    f32 scale[2];
    f32 min[2];
    i32 high[8];
};
// A type of two digits also has decode_floats(raw), floats_f16x2(word, first) and most, for products on the matrix unit.
template <class T> inline constexpr bool HAS_HIGH = false;
constexpr i32 DIGIT = 8;
// What the sum of a code's digits, each times what it counts, exceeds the code by.
template <class T> constexpr i32 OFFSET = T::offset * (HAS_HIGH<T> ? 1 + DIGIT : 1);

// Entry `index` of a plane.
DEV u32x4 plane_16(const u8* plane, u64 index) { return load16_once(plane + 16 * index); }
DEV u32x2 plane_8(const u8* plane, u64 index) { return load8(plane + 8 * index); }
DEV u32 plane_4(const u8* plane, u64 index) { return load4(plane + 4 * index); }
DEV u16 plane_2(const u8* plane, u64 index) { return *(const u16*)(plane + 2 * index); }
DEV u8 plane_1(const u8* plane, u64 index) { return plane[index]; }

DEV void unpack_nibbles(const u32x4& q, i32 (&code)[8]) {
    const u32 words[4] = {q.x, q.y, q.z, q.w};
    UNROLL for (u32 w = 0; w < 4; w++) {
        code[w] = i32(words[w] & 0x0f0f0f0fu);
        code[w + 4] = i32((words[w] >> 4) & 0x0f0f0f0fu);
    }
}

// Adds the fifth bits of a group, in the plane's order, to its nibbles.
DEV void add_fifth_bits(u32 high, i32 (&code)[8]) {
    UNROLL for (u32 w = 0; w < 8; w++) {
        const u32 spread = w <= 4 ? high << (4 - w) : high >> (w - 4);
        code[w] |= i32(spread & 0x10101010u);
    }
}

// A group's numbers of two bits, in the plane's order.
DEV void unpack_two_bits(const u32x2& q, i32 (&code)[8]) {
    UNROLL for (u32 w = 0; w < 4; w++) {
        code[w] = i32(q.x >> (2 * w) & 0x03030303u);
        code[w + 4] = i32(q.y >> (2 * w) & 0x03030303u);
    }
}

// Scale and minimum, 6 bits each, of group `index` (0..8) of a Q4_K or Q5_K header.
DEV u32 scale_and_min(const u32x4& header, u32 index) {
    // Copied out of the struct first: a choice between members would take an address and put the header in memory.
    const u32 first = header.y, second = header.z, third = header.w;
    const u32 low = index < 3 ? first : index < 6 ? second : third;
    const u32 high = index < 3 ? second : third;
    const u64 both = u64(high) << 32 | low;
    return u32(both >> (12 * index & 31)) & 0xfff;
}

// The 32 values of a group.
template <class T>
DEV void group_values(const Group& group, f32 (&out)[32]) {
    UNROLL for (u32 i = 0; i < 32; i++) {
        i32 code = byte_i8(u32(group.code[i / 4]), i % 4) - OFFSET<T>;
        if constexpr (HAS_HIGH<T>) code += DIGIT * byte_i8(u32(group.high[i / 4]), i % 4);
        out[i] = T::affine ? fma_f32(group.scale[i / 16], f32(code), group.min[i / 16]) : group.scale[i / 16] * f32(code);
    }
}

// Finite values past f16's range become its largest.
DEV f32 within_f16(f32 v) {
    const f32 size = abs_f32(v);
    return size > 65504.0f && size < INFINITY_F32 ? (v < 0.0f ? -65504.0f : 65504.0f) : v;
}
