// AMD matrix units: MFMA of CDNA (wave 64), WMMA of RDNA3 and RDNA4 (wave 32).
//
// Element l of a lane is this element (row, column) of a 16x16 matrix:
//   MFMA   A (lane%16, 4*(lane/16)+l)  B (4*(lane/16)+l, lane%16)  C (4*(lane/16)+l, lane%16)
//   RDNA3  A (lane%16, l)              B (l, lane%16)              C (2*l+lane/16, lane%16): both half-waves hold all of A and B
//   RDNA4  A (lane%16, 8*(lane/16)+l)  B (8*(lane/16)+l, lane%16)  C (8*(lane/16)+l, lane%16)
#pragma once

struct Frag {
#if defined(AMD_MFMA)
    static constexpr u32 IN = 4, OUT = 4;
    DEV static u32 first_k() { return 4 * (lane() / 16); }
    DEV static u32 out_row(u32 l) { return 4 * (lane() / 16) + l; }
#elif defined(__GFX11__)
    static constexpr u32 IN = 16, OUT = 8;
    DEV static u32 first_k() { return 0; }
    DEV static u32 out_row(u32 l) { return 2 * l + lane() / 16; }
#else
    static constexpr u32 IN = 8, OUT = 8;
    DEV static u32 first_k() { return 8 * (lane() / 16); }
    DEV static u32 out_row(u32 l) { return 8 * (lane() / 16) + l; }
#endif
    typedef f16 In __attribute__((ext_vector_type(IN)));
    typedef f32 Out __attribute__((ext_vector_type(OUT)));

    struct A {
        static constexpr u32 SIZE = IN;
        In v;
        DEV f16 get(u32 l) const { return v[l]; }
        DEV void set(u32 l, f16 x) { v[l] = x; }
        DEV static u32 row(u32) { return lane() % 16; }
        DEV static u32 k(u32 l) { return first_k() + l; }
    };
    struct B {
        static constexpr u32 SIZE = IN;
        In v;
        DEV f16 get(u32 l) const { return v[l]; }
        DEV void set(u32 l, f16 x) { v[l] = x; }
        DEV static u32 k(u32 l) { return first_k() + l; }
        DEV static u32 col(u32) { return lane() % 16; }
    };
    struct C {
        static constexpr u32 SIZE = OUT;
        Out v;
        DEV f32 get(u32 l) const { return v[l]; }
        DEV void set(u32 l, f32 x) { v[l] = x; }
        DEV static u32 row(u32 l) { return out_row(l); }
        DEV static u32 col(u32) { return lane() % 16; }
    };
    // Columns c and c + 8 lie in lanes 8 apart, and are added when they are read.
    struct Folded : C {
        DEV static u32 col(u32) { return lane() % 8; }
        DEV f32 sum(u32 l) const { return v[l] + shfl_xor(v[l], 8); }
    };

#if defined(__GFX11__)
    DEV static In load_row(const f16* p) {
        // Rows are aligned to 16 bytes; a load of a whole In would need 32.
        typedef f16 Half __attribute__((ext_vector_type(8)));
        Half low = *(const Half*)p, high = *(const Half*)(p + 8);
        return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    }
#else
    DEV static In load_row(const f16* p) { return *(const In*)p; }
#endif
    DEV static A load_a(const f16* p, u32 ld) { return {load_row(p + lane() % 16 * ld + first_k())}; }
    DEV static B load_bt(const f16* p, u32 ld) { return {load_row(p + lane() % 16 * ld + first_k())}; }
    DEV static B load_b(const f16* p, u32 ld) {
        B b;
        UNROLL for (u32 l = 0; l < IN; l++) b.v[l] = p[(first_k() + l) * ld + lane() % 16];
        return b;
    }
    DEV static A load_a_lds(const f16* p, u32 ld) { return load_a(p, ld); }
    DEV static B load_bt_lds(const f16* p, u32 ld) { return load_bt(p, ld); }
    DEV static C zero() { return {Out{}}; }
    DEV static Folded folded_zero() { return {zero()}; }
    DEV static Folded fold(const C& c) { return {c}; }
    DEV static C mma(A a, B b, C c) {
#if defined(AMD_MFMA)
        return {__builtin_amdgcn_mfma_f32_16x16x16f16(a.v, b.v, c.v, 0, 0, 0)};
#elif defined(__GFX11__)
        return {__builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a.v, b.v, c.v)};
#else
        return {__builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a.v, b.v, c.v)};
#endif
    }
    DEV static Folded mma_folded(A a, B b, Folded c) { return {mma(a, b, c)}; }
};

struct Strip {
    static constexpr u32 K_LANES = 16 / Frag::IN, HELD = 1;
    u32x4 v[HELD][2];
    DEV static u32 held(u32) { return lane() % 16; }
    DEV static u32 k_lane() { return K_LANES == 1 ? 0 : lane() / 16; }
    // As many operands as the strip fills.
    struct Operands {
        Frag::In v[16 / Frag::IN];
    };
    DEV static Frag::C mma(const Strip& a, const Strip& b, Frag::C c) {
        const Operands as = __builtin_bit_cast(Operands, a), bs = __builtin_bit_cast(Operands, b);
        UNROLL for (u32 i = 0; i < 16 / Frag::IN; i++) c = Frag::mma({as.v[i]}, {bs.v[i]}, c);
        return c;
    }
};
