// embed_rows: x[m] = scale * row m of the file's bytes, as f32
//
// The host gathers the embedding rows from the file.
// Shapes     bytes: row m at m * row_bytes, whole blocks of the type as in a GGUF file; x: f32[M][cols]
// Variants   embed_rows_<type>, type f32 f16 bf16 and all of quant/list.h
// Requires   cols a multiple of the type's block
// Launch     grid = (ceil(cols / 256), M), block = 256: a lane makes one value
// Alignment  16 bytes for `bytes`; row_bytes even, for f32 a multiple of 4, for mxfp4 and mxfp6 any
// Sums in    no sums; f32. At a scale of 1 values equal ggml's dequantize_row_* to the bit; the scale rounds once
// Tolerance  0: equal values
// Reference  ggml's values (tests/golden/quant-blocks.bin) times the scale in f32, in tests/kernels/embed.rs
// Moves      row_bytes in, 4 * cols out per row; bound by latency at few rows
#include "prelude/prelude.h"
#include "quant/blocks.h"
#include "quant/list.h"
namespace embed_rows {

// f16 at an even address.
DEV f32 half_at(const u8* p) { return f16_to_f32(f16_from_bits(*(const u16*)p)); }
// Value i of a block of 32 is the low nibble of byte i for i < 16, else the high nibble of byte i - 16.
DEV f32 nibble(const u8* codes, u32 i) { return (f32)(codes[i % 16] >> (i / 16 * 4) & 15); }
// As `nibble`, with bit i of the four bytes at `high` as the fifth bit.
DEV f32 five_bits(const u8* codes, const u8* high, u32 i) { return nibble(codes, i) + (f32)((high[i / 8] >> i % 8 & 1) * 16); }

// For each type: LENGTH values and BYTES bytes of a block, and value i of a block.
struct F32 {
    static constexpr u32 LENGTH = 1, BYTES = 4;
    DEV static f32 value(const u8* b, u32) { return *(const f32*)b; }
};
struct F16 {
    static constexpr u32 LENGTH = 1, BYTES = 2;
    DEV static f32 value(const u8* b, u32) { return half_at(b); }
};
struct BF16 {
    static constexpr u32 LENGTH = 1, BYTES = 2;
    DEV static f32 value(const u8* b, u32) { return as_f32((u32) * (const u16*)b << 16); }
};
struct Q8_0 {
    static constexpr u32 LENGTH = 32, BYTES = 34;
    DEV static f32 value(const u8* b, u32 i) { return (f32)(i8)b[2 + i] * half_at(b); }
};
struct Q4_0 {
    static constexpr u32 LENGTH = 32, BYTES = 18;
    DEV static f32 value(const u8* b, u32 i) { return (nibble(b + 2, i) - 8.0f) * half_at(b); }
};
struct Q4_1 {
    static constexpr u32 LENGTH = 32, BYTES = 20;
    DEV static f32 value(const u8* b, u32 i) { return nibble(b + 4, i) * half_at(b) + half_at(b + 2); }
};
struct Q5_0 {
    static constexpr u32 LENGTH = 32, BYTES = 22;
    DEV static f32 value(const u8* b, u32 i) { return (five_bits(b + 6, b + 2, i) - 16.0f) * half_at(b); }
};
struct Q5_1 {
    static constexpr u32 LENGTH = 32, BYTES = 24;
    DEV static f32 value(const u8* b, u32 i) { return five_bits(b + 8, b + 4, i) * half_at(b) + half_at(b + 2); }
};
// Scale j and minimum j (0..8) of the 12 packed bytes of Q4_K and Q5_K, 6 bits each.
struct ScaleMin {
    u32 scale, min;
    DEV ScaleMin(const u8* p, u32 j) {
        u32 a = p[j % 4], b = p[4 + j % 4], c = p[8 + j % 4];
        scale = j < 4 ? a & 63 : (c & 15) | a >> 6 << 4;
        min = j < 4 ? b & 63 : c >> 4 | b >> 6 << 4;
    }
};
struct Q4_K {
    static constexpr u32 LENGTH = 256, BYTES = 144;
    DEV static f32 value(const u8* b, u32 i) {
        ScaleMin s(b + 4, i / 32);
        u32 code = b[16 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
        return half_at(b) * (f32)s.scale * (f32)code - half_at(b + 2) * (f32)s.min;
    }
};
struct Q5_K {
    static constexpr u32 LENGTH = 256, BYTES = 176;
    DEV static f32 value(const u8* b, u32 i) {
        ScaleMin s(b + 4, i / 32);
        u32 code = b[48 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
        code += (b[16 + i % 32] >> i / 32 & 1) * 16;
        return half_at(b) * (f32)s.scale * (f32)code - half_at(b + 2) * (f32)s.min;
    }
};
struct Q6_K {
    static constexpr u32 LENGTH = 256, BYTES = 210;
    DEV static f32 value(const u8* b, u32 i) {
        u32 half = i / 128, quarter = i / 32 % 4, at = i % 32;
        u32 low = b[64 * half + quarter % 2 * 32 + at] >> (quarter / 2 * 4) & 15;
        u32 high = b[128 + 32 * half + at] >> (2 * quarter) & 3;
        f32 scale = (f32)(i8)b[192 + i / 16];
        return half_at(b + 208) * scale * (f32)((i32)(low | high << 4) - 32);
    }
};
struct MXFP4 {
    static constexpr u32 LENGTH = 32, BYTES = 17;
    DEV static f32 value(const u8* b, u32 i) {
        // The constant's bytes are doubled values of the 4-bit float, 0 1 2 3 4 6 8 12, so the scale is halved. Bit 3: sign.
        u32 code = (u32)nibble(b + 1, i), doubled = (u32)(0x0c08060403020100ull >> (8 * (code % 8))) & 255;
        return e8m0_half_to_f32(b[0]) * (code >= 8 ? -(f32)doubled : (f32)doubled);
    }
};
struct NVFP4 {
    static constexpr u32 LENGTH = 64, BYTES = 36;
    DEV static f32 value(const u8* b, u32 i) {
        const u32 code = b[4 + i / 16 * 8 + i % 8] >> (i % 16 / 8 * 4) & 15, doubled = (u32)(0x0c08060403020100ull >> (8 * (code % 8))) & 255;
        return ue4m3_half_to_f32(b[i / 16]) * (code >= 8 ? -(f32)doubled : (f32)doubled);
    }
};
// Six bits of value i: sign, exponent, mantissa of M bits.
template <u32 M> struct MXFP6 {
    static constexpr u32 LENGTH = 32, BYTES = 25;
    DEV static f32 value(const u8* b, u32 i) {
        const u32 bits = (b[1 + i % 16] >> (i / 16 * 4) & 15) | (b[17 + i / 16 * 4 + i % 4] >> (i % 16 / 4 * 2) & 3) << 4;
        const u32 exponent = bits >> M & ((1u << (5 - M)) - 1), mantissa = bits & ((1u << M) - 1);
        // Multiples of the least value, which is an eighth or a sixteenth.
        const u32 size = exponent == 0 ? mantissa : (mantissa | 1u << M) << (exponent - 1);
        return e8m0_half_to_f32(b[0]) * (M == 3 ? 0.25f : 0.125f) * (bits >= 32 ? -(f32)size : (f32)size);
    }
};
using MXFP6_E2M3 = MXFP6<3>;
using MXFP6_E3M2 = MXFP6<2>;

// Byte i (0..16) of two words, as a signed number.
DEV f32 table_byte(u64 low, u64 high, u32 i) { return (f32)(i8)((i < 8 ? low : high) >> (8 * (i % 8)) & 255); }
DEV f32 iq4(u32 code) { return table_byte(0xf6eaddcfbfad9881ull, 0x7159453526190d01ull, code); }
struct IQ4_NL {
    static constexpr u32 LENGTH = 32, BYTES = 18;
    DEV static f32 value(const u8* b, u32 i) { return iq4((u32)nibble(b + 2, i)) * half_at(b); }
};
// Types of blocks.h: d times the scale times a number that is exact, so that no product rounds.
template <class File> struct OfFile {
    static constexpr u32 LENGTH = File::BLOCK, BYTES = File::BYTES;
    DEV static f32 d(const u8* b) { return f16_to_f32(f16_from_bits((u16)File::d(b))); }
    DEV static f32 scaled(const u8* b, u32 i) { return d(b) * (f32)File::scale(b, i / 16); }
    DEV static f32 sized(const u8* b, u32 i, u64 sizes, f32 part) {
        const Sized code = File::code(b, i);
        const f32 size = table_byte(sizes, 0, code.size);
        return scaled(b, i) * part * (code.negative != 0 ? -size : size);
    }
};
struct Q2_K {
    static constexpr u32 LENGTH = 256, BYTES = 84;
    DEV static f32 value(const u8* b, u32 i) {
        using File = file::Q2_K;
        const f32 scale = half_at(b + 80) * (f32)File::scale(b, i / 16), min = half_at(b + 82) * (f32)File::min(b, i / 16);
        return scale * (f32)File::code(b, i) - min;
    }
};
struct Q3_K : OfFile<file::Q3_K> {
    DEV static f32 value(const u8* b, u32 i) { return scaled(b, i) * (f32)((i32)file::Q3_K::code(b, i) - 4); }
};
struct IQ4_XS : OfFile<file::IQ4_XS> {
    DEV static f32 value(const u8* b, u32 i) { return scaled(b, i) * iq4(file::IQ4_XS::code(b, i)); }
};
struct IQ3_XXS : OfFile<file::IQ3_XXS> {
    // 4 12 20 28 36 44 52 62
    DEV static f32 value(const u8* b, u32 i) { return sized(b, i, 0x3e342c241c140c04ull, 0.25f); }
};
struct IQ3_S : OfFile<file::IQ3_S> {
    // 1 3 5 7 9 11 13 15
    DEV static f32 value(const u8* b, u32 i) { return sized(b, i, 0x0f0d0b0907050301ull, 1.0f); }
};
// 8 25 43
template <class File> struct Sizes2 : OfFile<File> {
    DEV static f32 value(const u8* b, u32 i) { return OfFile<File>::sized(b, i, 0x2b1908, 0.125f); }
};
struct IQ2_XXS : Sizes2<file::IQ2_XXS> {};
struct IQ2_XS : Sizes2<file::IQ2_XS> {};
struct IQ2_S : Sizes2<file::IQ2_S> {};
template <class File> struct Eighths : OfFile<File> {
    DEV static f32 value(const u8* b, u32 i) {
        const f32 eighths = 8.0f * (f32)((i32)File::code(b, i) - 1) + (File::below(b, i / 8) != 0 ? -1.0f : 1.0f);
        return OfFile<File>::scaled(b, i) * 0.125f * eighths;
    }
};
struct IQ1_S : Eighths<file::IQ1_S> {};
struct IQ1_M : Eighths<file::IQ1_M> {};
template <class File> struct Ternary : OfFile<File> {
    DEV static f32 value(const u8* b, u32 i) { return OfFile<File>::d(b) * (f32)((i32)File::code(b, i) - 1); }
};
struct TQ1_0 : Ternary<file::TQ1_0> {};
struct TQ2_0 : Ternary<file::TQ2_0> {};

template <class Type> DEV void run(const u8* bytes, f32* x, u64 row_bytes, u32 cols, f32 scale) {
    u32 k = block_x() * block_threads() + thread_id();
    wait_for_predecessor();
    if (k >= cols) return;
    const u8* block = bytes + block_y() * row_bytes + (u64)(k / Type::LENGTH) * Type::BYTES;
    x[(u64)block_y() * cols + k] = Type::value(block, k % Type::LENGTH) * scale;
}

} // namespace embed_rows

#define EMBED_ROWS(NAME, TYPE)                                                                                                 \
    KERNEL(256, embed_rows_##NAME, const u8* bytes, f32* x, u64 row_bytes, u32 cols, f32 scale) {                              \
        embed_rows::run<embed_rows::TYPE>(bytes, x, row_bytes, cols, scale);                                                   \
    }

EMBED_ROWS(f32, F32)
EMBED_ROWS(f16, F16)
EMBED_ROWS(bf16, BF16)
QUANT_TYPES(EMBED_ROWS)
