// Copies one group from the file's bytes to its planes. File layouts follow ggml (ggml-common.h); values do not change.
//
// to_planes(block, planes, weights, g): `block` is the file's block that holds group g, at any address.
#pragma once
#include "blocks.h"
#include "types.h"

DEV u32x4 bytes_16(const u8* p) { return {bytes_4(p), bytes_4(p + 4), bytes_4(p + 8), bytes_4(p + 12)}; }

template <class T> DEV u8* plane(u8* planes, u64 weights, u32 index) { return planes + plane_offset<T>(weights, index); }
DEV void put_2(u8* plane, u64 index, u32 v) { *(u16*)(plane + 2 * index) = u16(v); }
DEV void put_4(u8* plane, u64 index, u32 v) { *(u32*)(plane + 4 * index) = v; }

// A word of the quant plane: low nibbles from `low` (four weights), high nibbles from `high` (the four weights 16 further on).
DEV u32 join_nibbles(u32 low, u32 high) { return (low & 0x0f0f0f0fu) | (high & 0x0f0f0f0fu) << 4; }

// Reorders fifth bits. In the file bit i belongs to weight i, in the plane bit 8b + w to weight 4w + b.
DEV u32 spread_fifth_bits(u32 file) {
    u32 out = 0;
    UNROLL for (u32 i = 0; i < 32; i++) out |= (file >> i & 1) << (8 * (i % 4) + i / 4);
    return out;
}

template <class T> struct Repack;

template <> struct Repack<Q8_0> {
    static constexpr u32 BLOCK = 32, BYTES = 34;
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        store16(planes + 32 * g, bytes_16(block + 2));
        store16(planes + 32 * g + 16, bytes_16(block + 18));
        put_2(plane<Q8_0>(planes, weights, 1), g, bytes_2(block));
    }
};
template <> struct Repack<Q4_0> {
    static constexpr u32 BLOCK = 32, BYTES = 18;
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        store16(planes + 16 * g, bytes_16(block + 2));
        put_2(plane<Q4_0>(planes, weights, 1), g, bytes_2(block));
    }
};
template <> struct Repack<Q4_1> {
    static constexpr u32 BLOCK = 32, BYTES = 20;
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        store16(planes + 16 * g, bytes_16(block + 4));
        put_4(plane<Q4_1>(planes, weights, 1), g, bytes_4(block));
    }
};
template <> struct Repack<Q5_0> {
    static constexpr u32 BLOCK = 32, BYTES = 22;
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        store16(planes + 16 * g, bytes_16(block + 6));
        put_4(plane<Q5_0>(planes, weights, 1), g, spread_fifth_bits(bytes_4(block + 2)));
        put_2(plane<Q5_0>(planes, weights, 2), g, bytes_2(block));
    }
};
template <> struct Repack<Q5_1> {
    static constexpr u32 BLOCK = 32, BYTES = 24;
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        store16(planes + 16 * g, bytes_16(block + 8));
        put_4(plane<Q5_1>(planes, weights, 1), g, spread_fifth_bits(bytes_4(block + 4)));
        put_4(plane<Q5_1>(planes, weights, 2), g, bytes_4(block));
    }
};
// In a Q4_K or Q5_K block, 32 bytes hold the nibbles of two groups: low nibbles of group 2i, high nibbles of group 2i + 1.
DEV void put_k_nibbles(const u8* nibbles, u8* quants, u64 g) {
    const u8* from = nibbles + 32 * (g % 8 / 2);
    const u32 shift = 4 * u32(g % 2);
    u32 out[4];
    UNROLL for (u32 w = 0; w < 4; w++) {
        out[w] = join_nibbles(bytes_4(from + 4 * w) >> shift, bytes_4(from + 16 + 4 * w) >> shift);
    }
    store16(quants + 16 * g, {out[0], out[1], out[2], out[3]});
}
// d, dmin and twelve bytes of packed scales and minima -> d, dmin and eight times 12 bits. Done for the first group of a block.
DEV void put_k_header(const u8* block, u8* headers, u64 g) {
    if (g % 8 != 0) return;
    const u8* packed = block + 4;
    u64 bits[2] = {0, 0};
    UNROLL for (u32 j = 0; j < 8; j++) {
        u32 scale, min;
        if (j < 4) {
            scale = packed[j] & 63u;
            min = packed[j + 4] & 63u;
        } else {
            scale = (packed[j + 4] & 15u) | (packed[j - 4] >> 6) << 4;
            min = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4;
        }
        const u64 both = scale | min << 6;
        bits[j * 12 / 64] |= both << (j * 12 % 64);
        if (j == 5) bits[1] |= both >> 4;
    }
    store16(headers + 16 * (g / 8), {bytes_4(block), u32(bits[0]), u32(bits[0] >> 32), u32(bits[1])});
}

template <> struct Repack<Q4_K> {
    static constexpr u32 BLOCK = 256, BYTES = 144;
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        put_k_nibbles(block + 16, planes, g);
        put_k_header(block, plane<Q4_K>(planes, weights, 1), g);
    }
};
template <> struct Repack<Q5_K> {
    static constexpr u32 BLOCK = 256, BYTES = 176;
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        put_k_nibbles(block + 48, planes, g);
        put_k_header(block, plane<Q5_K>(planes, weights, 2), g);
        // Byte i of the 32 holds the fifth bits of weight i of all eight groups.
        u32 high = 0;
        UNROLL for (u32 i = 0; i < 32; i++) high |= (block[16 + i] >> (g % 8) & 1u) << (8 * (i % 4) + i / 4);
        put_4(plane<Q5_K>(planes, weights, 1), g, high);
    }
};
template <> struct Repack<Q6_K> {
    static constexpr u32 BLOCK = 256, BYTES = 210;
    // Each half of a block has 64 bytes of nibbles and 32 of upper bits for four groups. Group q of them has bytes
    // 32 (q % 2) .., their low nibbles for q < 2, else the high ones, and bits 2q and 2q + 1 of each upper byte.
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        const u32 half = u32(g % 8 / 4), q = u32(g % 4);
        const u8* low = block + 64 * half + 32 * (q % 2);
        const u8* high = block + 128 + 32 * half;
        const u32 shift = 4 * (q / 2);
        u32 out[4], upper[2] = {0, 0};
        UNROLL for (u32 w = 0; w < 4; w++) {
            out[w] = join_nibbles(bytes_4(low + 4 * w) >> shift, bytes_4(low + 16 + 4 * w) >> shift);
            upper[0] |= (bytes_4(high + 4 * w) >> (2 * q) & 0x03030303u) << (2 * w);
            upper[1] |= (bytes_4(high + 16 + 4 * w) >> (2 * q) & 0x03030303u) << (2 * w);
        }
        store16(planes + 16 * g, {out[0], out[1], out[2], out[3]});
        store8(plane<Q6_K>(planes, weights, 1) + 8 * g, {upper[0], upper[1]});
        put_2(plane<Q6_K>(planes, weights, 2), g, bytes_2(block + 192 + 2 * (g % 8)));
        if (g % 8 == 0) put_2(plane<Q6_K>(planes, weights, 3), g / 8, bytes_2(block + 208));
    }
};
