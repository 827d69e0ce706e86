// The numbers in a file's block of the types below four bits and of those of codebooks. File layouts follow ggml (ggml-common.h).
//
// A type's struct has, with i the number of a weight in its block, g of a group of 32 and h of a half group of 16:
//   BLOCK, BYTES   weights and bytes of a block
//   code(b, i)     the weight's number: of two or three bits, or a size and a sign (Sized)
//   scale(b, h)    the integer scale; d(b)  the f16 that it multiplies
// All bytes are read one by one: a block begins at any address.
#pragma once
#include "grids.h"

DEV u32 bytes_2(const u8* p) { return u32(p[0]) | u32(p[1]) << 8; }
DEV u32 bytes_4(const u8* p) { return bytes_2(p) | bytes_2(p + 2) << 16; }

// Sizes of a codebook: the number of a size, and 1 for a negative weight.
struct Sized {
    u32 size, negative;
};

// Sign j (0..8) of seven: the eighth makes their number even.
DEV u32 even_sign(u32 seven, u32 j) { return (j < 7 ? seven >> j : popcount(seven)) & 1; }
DEV u32 nibble_of(const u8* b, u32 i) { return b[i / 2] >> (4 * (i % 2)) & 15; }
DEV u32 two_bits_of(const u8* b, u32 i) { return b[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3; }

namespace file {
struct Q2_K {
    static constexpr u32 BLOCK = 256, BYTES = 84;
    DEV static u32 code(const u8* b, u32 i) { return two_bits_of(b + 16, i); }
    DEV static u32 scale(const u8* b, u32 h) { return b[h] & 15; }
    DEV static u32 min(const u8* b, u32 h) { return b[h] >> 4; }
};
struct Q3_K {
    static constexpr u32 BLOCK = 256, BYTES = 110;
    // 4 too large.
    DEV static u32 code(const u8* b, u32 i) { return two_bits_of(b + 32, i) | (b[i % 32] >> (i / 32) & 1) << 2; }
    DEV static i32 scale(const u8* b, u32 h) {
        const u32 low = b[96 + h % 8] >> (h / 8 * 4) & 15, high = b[104 + h % 4] >> (h / 4 * 2) & 3;
        return i32(low | high << 4) - 32;
    }
    DEV static u32 d(const u8* b) { return bytes_2(b + 108); }
};
struct IQ4_XS {
    static constexpr u32 BLOCK = 256, BYTES = 136;
    DEV static u32 code(const u8* b, u32 i) { return b[8 + i / 32 * 16 + i % 16] >> (i / 16 % 2 * 4) & 15; }
    DEV static i32 scale(const u8* b, u32 h) {
        const u32 g = h / 2;
        return i32(nibble_of(b + 4, g) | (bytes_2(b + 2) >> (2 * g) & 3) << 4) - 32;
    }
    DEV static u32 d(const u8* b) { return bytes_2(b); }
};
struct IQ3_XXS {
    static constexpr u32 BLOCK = 256, BYTES = 98;
    DEV static Sized code(const u8* b, u32 i) {
        const u32 seven = bytes_4(b + 66 + i / 32 * 4) >> (i % 32 / 8 * 7) & 127;
        return {u32(IQ3_XXS_GRID[b[2 + i / 4]]) >> (i % 4 * 3) & 7, even_sign(seven, i % 8)};
    }
    DEV static i32 scale(const u8* b, u32 h) { return i32(b[66 + h / 2 * 4 + 3] >> 4) * 2 + 1; }
    DEV static u32 d(const u8* b) { return bytes_2(b); }
};
struct IQ3_S {
    static constexpr u32 BLOCK = 256, BYTES = 110;
    DEV static Sized code(const u8* b, u32 i) {
        const u32 index = b[2 + i / 4] | (b[66 + i / 32] >> (i % 32 / 4) & 1u) << 8;
        return {u32(IQ3_S_GRID[index]) >> (i % 4 * 3) & 7, b[74 + i / 8] >> (i % 8) & 1u};
    }
    DEV static i32 scale(const u8* b, u32 h) { return i32(nibble_of(b + 106, h / 2)) * 2 + 1; }
    DEV static u32 d(const u8* b) { return bytes_2(b); }
};
struct IQ2_XXS {
    static constexpr u32 BLOCK = 256, BYTES = 66;
    DEV static Sized code(const u8* b, u32 i) {
        const u8* group = b + 2 + i / 32 * 8;
        const u32 k = i % 32 / 8, seven = bytes_4(group + 4) >> (7 * k) & 127;
        return {u32(IQ2_XXS_GRID[group[k]]) >> (i % 8 * 2) & 3, even_sign(seven, i % 8)};
    }
    DEV static i32 scale(const u8* b, u32 h) { return i32(b[2 + h / 2 * 8 + 7] >> 4) * 2 + 1; }
    DEV static u32 d(const u8* b) { return bytes_2(b); }
};
struct IQ2_XS {
    static constexpr u32 BLOCK = 256, BYTES = 74;
    DEV static Sized code(const u8* b, u32 i) {
        const u32 both = bytes_2(b + 2 + i / 8 * 2);
        return {u32(IQ2_XS_GRID[both & 511]) >> (i % 8 * 2) & 3, even_sign(both >> 9, i % 8)};
    }
    DEV static i32 scale(const u8* b, u32 h) { return i32(nibble_of(b + 66, h)) * 2 + 1; }
    DEV static u32 d(const u8* b) { return bytes_2(b); }
};
struct IQ2_S {
    static constexpr u32 BLOCK = 256, BYTES = 82;
    DEV static Sized code(const u8* b, u32 i) {
        const u32 index = b[2 + i / 8] | (b[66 + i / 32] >> (i % 32 / 8 * 2) & 3u) << 8;
        return {u32(IQ2_S_GRID[index]) >> (i % 8 * 2) & 3, b[34 + i / 8] >> (i % 8) & 1u};
    }
    DEV static i32 scale(const u8* b, u32 h) { return i32(nibble_of(b + 74, h)) * 2 + 1; }
    DEV static u32 d(const u8* b) { return bytes_2(b); }
};
// Codes 0, 1 and 2; below(b, k): 1 where eight weights, the k-th eight of a block, are an eighth too large, else too small.
struct IQ1_S {
    static constexpr u32 BLOCK = 256, BYTES = 50;
    DEV static u32 head(const u8* b, u32 g) { return bytes_2(b + 34 + 2 * g); }
    DEV static u32 code(const u8* b, u32 i) {
        const u32 index = b[2 + i / 8] | (head(b, i / 32) >> (i % 32 / 8 * 3) & 7) << 8;
        return u32(IQ1_GRID[index]) >> (i % 8 * 2) & 3;
    }
    DEV static u32 below(const u8* b, u32 k) { return head(b, k / 4) >> 15; }
    DEV static u32 scale(const u8* b, u32 h) { return (head(b, h / 2) >> 12 & 7) * 2 + 1; }
    DEV static u32 d(const u8* b) { return bytes_2(b); }
};
struct IQ1_M {
    static constexpr u32 BLOCK = 256, BYTES = 56;
    DEV static u32 code(const u8* b, u32 i) {
        const u32 index = b[i / 8] | (nibble_of(b + 32, i / 8) & 7) << 8;
        return u32(IQ1_GRID[index]) >> (i % 8 * 2) & 3;
    }
    DEV static u32 below(const u8* b, u32 k) { return nibble_of(b + 32, k) >> 3; }
    DEV static u32 scale(const u8* b, u32 h) { return (bytes_2(b + 48 + h / 4 * 2) >> (h % 4 * 3) & 7) * 2 + 1; }
    // Four bits of it are the upper ones of each word of scales.
    DEV static u32 d(const u8* b) { return b[49] >> 4 | (b[51] >> 4) << 4 | (b[53] >> 4) << 8 | (b[55] >> 4) << 12; }
};
// Codes 0, 1 and 2.
struct TQ1_0 {
    static constexpr u32 BLOCK = 256, BYTES = 54;
    // Digit n of base three: a byte times 3^n, modulo 256, times 3 / 256.
    DEV static u32 digit(u32 byte, u32 n) {
        const u32 power = n == 0 ? 1 : n == 1 ? 3 : n == 2 ? 9 : n == 3 ? 27 : 81;
        return (byte * power & 255) * 3 >> 8;
    }
    DEV static u32 code(const u8* b, u32 i) {
        if (i < 160) return digit(b[i % 32], i / 32);
        if (i < 240) return digit(b[32 + i % 16], (i - 160) / 16);
        return digit(b[48 + i % 4], (i - 240) / 4);
    }
    DEV static u32 d(const u8* b) { return bytes_2(b + 52); }
};
struct TQ2_0 {
    static constexpr u32 BLOCK = 256, BYTES = 66;
    DEV static u32 code(const u8* b, u32 i) { return two_bits_of(b, i); }
    DEV static u32 d(const u8* b) { return bytes_2(b + 64); }
};
} // namespace file
