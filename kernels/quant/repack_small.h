// Copies one group of the types in small.h from the file's bytes to its planes. repack.h says how it is called.
#pragma once
#include "repack.h"
#include "small.h"

// Nibbles, two bits or one bit of each weight of a group, in the plane's order; f(i) gives those of weight i.
template <class F> DEV void put_nibbles(u8* plane, u64 g, F f) {
    u32 words[4] = {0, 0, 0, 0};
    UNROLL for (u32 i = 0; i < 32; i++) words[i % 16 / 4] |= f(i) << (8 * (i % 4) + i / 16 * 4);
    store16(plane + 16 * g, {words[0], words[1], words[2], words[3]});
}
template <class F> DEV void put_two_bits(u8* plane, u64 g, F f) {
    u32 words[2] = {0, 0};
    UNROLL for (u32 i = 0; i < 32; i++) words[i / 16] |= f(i) << (8 * (i % 4) + i % 16 / 4 * 2);
    store8(plane + 8 * g, {words[0], words[1]});
}
template <class F> DEV void put_one_bit(u8* plane, u64 g, F f) {
    u32 word = 0;
    UNROLL for (u32 i = 0; i < 32; i++) word |= f(i) << (8 * (i % 4) + i / 4);
    put_4(plane, g, word);
}
template <class File> DEV u32 two_scales(const u8* block, u64 g) {
    const u32 h = 2 * u32(g % 8);
    return u32(u8(File::scale(block, h))) | u32(u8(File::scale(block, h + 1))) << 8;
}

template <> struct Repack<IQ4_NL> {
    static constexpr u32 BLOCK = 32, BYTES = 18;
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        store16(planes + 16 * g, bytes_16(block + 2));
        put_2(plane<IQ4_NL>(planes, weights, 1), g, bytes_2(block));
    }
};

DEV u32 table_index(u32 code) { return code; }
DEV u32 table_index(const Sized& code) { return code.size | code.negative << 3; }
template <class File, class T> struct RepackNibbles {
    static constexpr u32 BLOCK = File::BLOCK, BYTES = File::BYTES;
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        const u32 first = 32 * u32(g % 8);
        put_nibbles(planes, g, [&](u32 i) { return table_index(File::code(block, first + i)); });
        plane<T>(planes, weights, 1)[g] = u8(File::scale(block, first / 16));
        if (g % 8 == 0) put_2(plane<T>(planes, weights, 2), g / 8, File::d(block));
    }
};
template <> struct Repack<IQ4_XS> : RepackNibbles<file::IQ4_XS, IQ4_XS> {};
template <> struct Repack<IQ3_XXS> : RepackNibbles<file::IQ3_XXS, IQ3_XXS> {};
template <> struct Repack<IQ3_S> : RepackNibbles<file::IQ3_S, IQ3_S> {};

template <> struct Repack<Q3_K> {
    using File = file::Q3_K;
    static constexpr u32 BLOCK = File::BLOCK, BYTES = File::BYTES;
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        const u32 first = 32 * u32(g % 8);
        put_two_bits(planes, g, [&](u32 i) { return File::code(block, first + i) & 3; });
        put_one_bit(plane<Q3_K>(planes, weights, 1), g, [&](u32 i) { return File::code(block, first + i) >> 2; });
        put_2(plane<Q3_K>(planes, weights, 2), g, two_scales<File>(block, g));
        if (g % 8 == 0) put_2(plane<Q3_K>(planes, weights, 3), g / 8, File::d(block));
    }
};

template <class File, class T> struct RepackSizes {
    static constexpr u32 BLOCK = File::BLOCK, BYTES = File::BYTES;
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        const u32 first = 32 * u32(g % 8);
        put_two_bits(planes, g, [&](u32 i) { return File::code(block, first + i).size; });
        put_one_bit(plane<T>(planes, weights, 1), g, [&](u32 i) { return File::code(block, first + i).negative; });
        if constexpr (T::halves) put_2(plane<T>(planes, weights, 2), g, two_scales<File>(block, g));
        else plane<T>(planes, weights, 2)[g] = u8(File::scale(block, first / 16));
        if (g % 8 == 0) put_2(plane<T>(planes, weights, 3), g / 8, File::d(block));
    }
};
template <> struct Repack<IQ2_XXS> : RepackSizes<file::IQ2_XXS, IQ2_XXS> {};
template <> struct Repack<IQ2_XS> : RepackSizes<file::IQ2_XS, IQ2_XS> {};
template <> struct Repack<IQ2_S> : RepackSizes<file::IQ2_S, IQ2_S> {};

template <> struct Repack<Q2_K> {
    using File = file::Q2_K;
    static constexpr u32 BLOCK = File::BLOCK, BYTES = File::BYTES;
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        const u32 first = 32 * u32(g % 8);
        put_two_bits(planes, g, [&](u32 i) { return File::code(block, first + i); });
        put_2(plane<Q2_K>(planes, weights, 1), g, bytes_2(block + first / 16));
        if (g % 8 == 0) put_4(plane<Q2_K>(planes, weights, 2), g / 8, bytes_4(block + 80));
    }
};

template <class File, class T> struct RepackTernary {
    static constexpr u32 BLOCK = File::BLOCK, BYTES = File::BYTES;
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        const u32 first = 32 * u32(g % 8);
        put_two_bits(planes, g, [&](u32 i) { return File::code(block, first + i); });
        if (g % 8 == 0) put_2(plane<T>(planes, weights, 1), g / 8, File::d(block));
    }
};
template <> struct Repack<TQ1_0> : RepackTernary<file::TQ1_0, TQ1_0> {};
template <> struct Repack<TQ2_0> : RepackTernary<file::TQ2_0, TQ2_0> {};

template <> struct Repack<IQ1_S> {
    using File = file::IQ1_S;
    static constexpr u32 BLOCK = File::BLOCK, BYTES = File::BYTES;
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        const u32 first = 32 * u32(g % 8);
        put_two_bits(planes, g, [&](u32 i) { return File::code(block, first + i); });
        plane<IQ1_S>(planes, weights, 1)[g] = u8(File::scale(block, first / 16) | File::below(block, first / 8) << 4);
        if (g % 8 == 0) put_2(plane<IQ1_S>(planes, weights, 2), g / 8, File::d(block));
    }
};
template <> struct Repack<IQ1_M> {
    using File = file::IQ1_M;
    static constexpr u32 BLOCK = File::BLOCK, BYTES = File::BYTES;
    DEV static void to_planes(const u8* block, u8* planes, u64 weights, u64 g) {
        const u32 first = 32 * u32(g % 8), h = first / 16;
        put_two_bits(planes, g, [&](u32 i) { return File::code(block, first + i); });
        u32 packed = File::scale(block, h) | File::scale(block, h + 1) << 4;
        UNROLL for (u32 k = 0; k < 4; k++) packed |= File::below(block, first / 8 + k) << (8 + k);
        put_2(plane<IQ1_M>(planes, weights, 1), g, packed);
        if (g % 8 == 0) put_2(plane<IQ1_M>(planes, weights, 2), g / 8, File::d(block));
    }
};
