// Arithmetic with one source for all targets, on top of the operations of amd.h, nvidia.h and host.h.
#pragma once

constexpr f32 LOG2_E = 1.4426950408889634f;
constexpr f32 LN_2 = 0.6931471805599453f;
#define INFINITY_F32 as_f32(0x7f800000u)

#if !defined(GLOBAL)
#define GLOBAL
#endif
template <class T> DEV T* global_address(u64 address) { return (T*)(GLOBAL T*)address; }

DEV i32 as_i32(u32 v) { return (i32)v; }
DEV u32 min_u32(u32 a, u32 b) { return a < b ? a : b; }
DEV u32 max_u32(u32 a, u32 b) { return a > b ? a : b; }
DEV i32 min_i32(i32 a, i32 b) { return a < b ? a : b; }
DEV i32 max_i32(i32 a, i32 b) { return a > b ? a : b; }
DEV i32 clamp_i32(i32 v, i32 low, i32 high) { return min_i32(max_i32(v, low), high); }
DEV u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }

DEV u32 bits(u32 v, u32 from, u32 count) { return v >> from & ((1u << count) - 1u); }
DEV u32 byte_u8(u32 v, u32 i) { return v >> (8 * i) & 0xffu; }
DEV i32 byte_i8(u32 v, u32 i) { return (i32)(i8)(v >> (8 * i)); }
DEV u32 pack_i8x4(i32 a, i32 b, i32 c, i32 d) {
    return ((u32)a & 0xffu) | ((u32)b & 0xffu) << 8 | ((u32)c & 0xffu) << 16 | (u32)d << 24;
}

DEV f32 exp_f32(f32 a) { return exp2_f32(a * LOG2_E); }
DEV f32 log_f32(f32 a) { return log2_f32(a) * LN_2; }
DEV f32 sigmoid_f32(f32 a) { return 1.0f / (1.0f + exp_f32(-a)); }
DEV f32 silu_f32(f32 a) { return a / (1.0f + exp_f32(-a)); }
// 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), as x / (1 + e^-2u): x for large x, 0 for large -x.
DEV f32 gelu_f32(f32 a) { return a / (1.0f + exp_f32(-1.5957691216057308f * (a * fma_f32(0.044715f * a, a, 1.0f)))); }
// The activation of gates: 0 SiLU, 1 GELU. The number is the same for all lanes.
DEV f32 activated(f32 a, u32 activation) { return activation == 0 ? silu_f32(a) : gelu_f32(a); }
// Near 0 the subtraction cancels digits: absolute error 1.2e-7, relative 2.1e-6 at 0.1.
DEV f32 tanh_f32(f32 a) { return 1.0f - 2.0f / (exp_f32(2.0f * a) + 1.0f); }

DEV f32 bf16_to_f32(bf16 v) { return as_f32((u32)v.bits << 16); }
DEV bf16 f32_to_bf16(f32 v) {
    u32 b = as_u32(v);
    // Sets a bit that remains: else a NaN whose payload lies in the dropped bits would become an infinity.
    u32 rounded = (b & 0x7fffffffu) > 0x7f800000u ? b | 0x400000u : b + 0x7fffu + (b >> 16 & 1u);
    return {(u16)(rounded >> 16)};
}
DEV f32x2 unpack_bf16x2(u32 v) { return {as_f32(v << 16), as_f32(v & 0xffff0000u)}; }
DEV f32x2 unpack_f16x2(u32 v) {
    return {f16_to_f32(f16_from_bits((u16)v)), f16_to_f32(f16_from_bits((u16)(v >> 16)))};
}
#if !HAS_NUMBER_TRICKS
DEV u32 pack_f16x2(f32 low, f32 high) {
    return (u32)f16_bits(f32_to_f16(low)) | (u32)f16_bits(f32_to_f16(high)) << 16;
}
DEV u32 computed_again(u32 v) { return v; }
DEV u32 within_f16x2(u32 v) {
    const f32x2 both = unpack_f16x2(v);
    const auto within = [](f32 one) { return abs_f32(one) > 65504.0f ? (one < 0.0f ? -65504.0f : 65504.0f) : one; };
    return pack_f16x2(within(both.x), within(both.y));
}
#endif
// Exponent 0 is the denormal 2^-127.
DEV f32 e8m0_to_f32(u8 e) { return as_f32(e == 0 ? 0x400000u : (u32)e << 23); }
// By way of f16, which has one bit of the exponent more. 0x7f is 0, as in ggml.
DEV f32 ue4m3_half_to_f32(u8 v) { return v == 0x7f ? 0.0f : f16_to_f32(f16_from_bits((u16)((v & 127) << 7))) * 128.0f; }
DEV f32 e8m0_half_to_f32(u8 e) { return as_f32(e < 2 ? 0x200000u << e : (u32)(e - 1) << 23); }
