// The forms in which a row of activations goes to a matmul, and their making from f32.
//
// A8   i8 codes[padded], f32 scales[padded / 32], i16 sums[padded / 16] (exact sums of 16 codes); past the row's end codes,
//      scales and sums are 0. For each 32 values: amax = largest magnitude; scale = amax / 127, code = x * (127 / amax)
//      rounded to nearest, ties to even, all in f32. amax < 2^-100: scale and codes 0. A NaN or infinity: scale NaN, codes 0.
// F32  the values.
// X16  f16 values and one f32 scale for each row: x = value * scale. Rows of `cols` values one after the other, or in tiles where
//      the wide matrix unit reads them (tiled.h): then with zeros up to whole steps. The scale is the power of two that brings the row's amax into
//      [2^13, 2^14): f16 does not overflow, and values down to 2^-27 of amax keep all 11 bits. amax < 2^-100: scale and
//      values 0. A NaN or infinity: scale NaN, values 0.
//
// The bits do not depend on the wave size. A lane holds 4 consecutive values, 8 neighbouring lanes a group of 32.
#pragma once
#include "../prelude/prelude.h"
#include "tiled.h"

// Four values of a row.
struct Four {
    f32 v[4];
};

// A8 form of one row.
struct A8Row {
    i8* codes;
    f32* scales;
    i16* sums;
};

constexpr u32 INFINITY_BITS = 0x7f800000u, NAN_BITS = 0x7fc00000u;
// 2^-100: a smaller amax counts as 0, so that 127 / amax stays far from overflow.
constexpr u32 AMAX_MIN_BITS = 27u << 23;

DEV A8Row a8_row(i8* codes, f32* scales, i16* sums, u32 row, u32 padded) {
    u64 at = (u64)row * padded;
    return {codes + at, scales + at / 32, sums + at / 16};
}

// Bits of |x|, which rise with the magnitude; NaN above infinity.
DEV u32 magnitude(f32 x) { return as_u32(x) & 0x7fffffffu; }

DEV u32 magnitude(const Four& x) {
    u32 most = 0;
    UNROLL for (u32 i = 0; i < 4; i++) most = max_u32(most, magnitude(x.v[i]));
    return most;
}

// Whether rows of `cols` values from `base` may be read and written four at a time.
DEV bool rows_are_wide(const void* base, u32 cols) { return (u64)base % 16 == 0 && cols % 4 == 0; }

// Values k..k+4 of a row of `cols`, 0 past its end. `wide`: as rows_are_wide says.
DEV Four load_four(const f32* row, u32 k, u32 cols, bool wide) {
    Four x = {{0.0f, 0.0f, 0.0f, 0.0f}};
    if (wide) {
        if (k >= cols) return x;
        u32x4 raw = load16(row + k);
        return {{as_f32(raw.x), as_f32(raw.y), as_f32(raw.z), as_f32(raw.w)}};
    }
    UNROLL for (u32 i = 0; i < 4; i++) {
        if (k + i < cols) x.v[i] = row[k + i];
    }
    return x;
}

DEV void store_four(f32* row, u32 k, u32 cols, bool wide, const Four& x) {
    if (wide) {
        if (k < cols) store16(row + k, {as_u32(x.v[0]), as_u32(x.v[1]), as_u32(x.v[2]), as_u32(x.v[3])});
        return;
    }
    UNROLL for (u32 i = 0; i < 4; i++) {
        if (k + i < cols) row[k + i] = x.v[i];
    }
}

// Scale of an A8 group, and the factor for its values; a factor of 0 makes all codes 0.
struct A8Scale {
    f32 scale, factor;
};

DEV A8Scale a8_scale(u32 amax_bits) {
    if (amax_bits >= INFINITY_BITS) return {as_f32(NAN_BITS), 0.0f};
    if (amax_bits < AMAX_MIN_BITS) return {0.0f, 0.0f};
    f32 amax = as_f32(amax_bits);
    return {amax / 127.0f, 127.0f / amax};
}

// A group with a NaN has factor 0; the test is needed because 0 * NaN is NaN.
DEV i32 a8_code(f32 x, f32 factor) { return factor == 0.0f ? 0 : (i32)round_even_f32(x * factor); }

// Quantises the group of 32 that 8 neighbouring lanes hold; the calling lane holds values k..k+4. Every lane of the wave calls.
// `k` rises by 4 from lane to lane and is a multiple of 32 in every eighth. Nothing is written from `padded` on.
DEV void store_a8(const A8Row& out, u32 k, u32 padded, const Four& x) {
    A8Scale scale = a8_scale(wave_max<8>(magnitude(x)));
    i32 code[4];
    UNROLL for (u32 i = 0; i < 4; i++) code[i] = a8_code(x.v[i], scale.factor);
    i32 sum = wave_sum<4>(code[0] + code[1] + code[2] + code[3]);
    if (k >= padded) return;
    *(u32*)(out.codes + k) = pack_i8x4(code[0], code[1], code[2], code[3]);
    if (k % 16 == 0) out.sums[k / 16] = (i16)sum;
    if (k % 32 == 0) out.scales[k / 32] = scale.scale;
}

// Scale of an X16 row, and the factor for its values; a factor of 0 makes all values 0.
struct X16Scale {
    f32 scale, factor;
};

DEV X16Scale x16_scale(u32 amax_bits) {
    if (amax_bits >= INFINITY_BITS) return {as_f32(NAN_BITS), 0.0f};
    if (amax_bits < AMAX_MIN_BITS) return {0.0f, 0.0f};
    // 2^(e - 13) and its inverse, e the exponent of amax.
    u32 exponent = amax_bits >> 23;
    return {as_f32((exponent - 13) << 23), as_f32((127 + 127 + 13 - exponent) << 23)};
}

// The f16 values of row `row`.
struct X16Row {
    f16* p;
    u32 row, cols, tiled;
    bool wide;

    DEV X16Row(f16* out, u32 row, u32 cols, u32 tiled)
        : p(tiled ? out : out + u64(row) * cols), row(row), cols(cols), tiled(tiled), wide(rows_are_wide(out, cols)) {}

    // Values to write.
    DEV u32 end() const { return tiled ? ceil_div(cols, TILED_COLS) * TILED_COLS : cols; }

    // Values k..k+4, which are 0 from `cols` on; k is a multiple of 4.
    DEV void store(u32 k, const Four& x, f32 factor) const {
        f32 y[4];
        UNROLL for (u32 i = 0; i < 4; i++) y[i] = factor == 0.0f ? 0.0f : x.v[i] * factor;
        if (tiled) {
            if (k >= end()) return;
            const u32 steps = ceil_div(cols, TILED_COLS);
            UNROLL for (u32 i = 0; i < 4; i += 2) *(u32*)(p + tiled_pair(row, k + i, steps)) = pack_f16x2(y[i], y[i + 1]);
            return;
        }
        if (wide) {
            if (k < cols) store8(p + k, {pack_f16x2(y[0], y[1]), pack_f16x2(y[2], y[3])});
            return;
        }
        UNROLL for (u32 i = 0; i < 4; i++) {
            if (k + i < cols) p[k + i] = f32_to_f16(y[i]);
        }
    }
};
