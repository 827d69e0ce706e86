// Copies one group of the types in small_floats.h from the file's bytes to its planes. repack.h says how it is called.
#pragma once
#include "repack.h"
#include "small_floats.h"

template <> struct Repack<MXFP4> {
    static constexpr u32 BLOCK = 32, BYTES = 17;
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        store16(planes + 16 * g, bytes_16(block + 1));
        plane<MXFP4>(planes, weights, 1)[g] = block[0];
    }
};
// The file's order of codes is the planes'.
template <bool E3M2> struct Repack<MXFP6<E3M2>> {
    using T = MXFP6<E3M2>;
    static constexpr u32 BLOCK = 32, BYTES = 25;
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        store16(planes + 16 * g, bytes_16(block + 1));
        store8(plane<T>(planes, weights, 1) + 8 * g, {bytes_4(block + 17), bytes_4(block + 21)});
        plane<T>(planes, weights, 2)[g] = block[0];
    }
};
template <> struct Repack<NVFP4> {
    static constexpr u32 BLOCK = 64, BYTES = 36;
    // Each eight bytes of a block hold 16 weights, eight in the low nibbles and the next eight in the high ones.
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        const u32 half = u32(g % 2);
        const u8* from = block + 4 + 16 * half;
        const u32 first[2] = {bytes_4(from), bytes_4(from + 4)}, second[2] = {bytes_4(from + 8), bytes_4(from + 12)};
        store16(planes + 16 * g, {join_nibbles(first[0], second[0]), join_nibbles(first[1], second[1]),
                                  join_nibbles(first[0] >> 4, second[0] >> 4), join_nibbles(first[1] >> 4, second[1] >> 4)});
        put_2(plane<NVFP4>(planes, weights, 1), g, bytes_2(block + 2 * half));
    }
};
