// The matrix unit on the CPU. Lanes hold the elements that they hold on the imitated device (MFMA at wave 64, RDNA3's WMMA at
// wave 32; see amd_matrix.h). A wave exchanges its operands; each lane computes its elements, k ascending, one rounding a step.
#pragma once

struct Frag {
#if WAVE == 64
    static constexpr u32 IN = 4, OUT = 4;
    DEV static u32 first_k() { return 4 * (lane() / 16); }
    DEV static u32 out_row(u32 l) { return 4 * (lane() / 16) + l; }
    // The lane and the element in it that hold (row or column, k).
    DEV static u32 holder(u32 i, u32 k) { return i + 16 * (k / 4); }
    DEV static u32 element(u32 k) { return k % 4; }
#else
    static constexpr u32 IN = 16, OUT = 8;
    DEV static u32 first_k() { return 0; }
    DEV static u32 out_row(u32 l) { return 2 * l + lane() / 16; }
    DEV static u32 holder(u32 i, u32) { return i; }
    DEV static u32 element(u32 k) { return k; }
#endif

    struct A {
        static constexpr u32 SIZE = IN;
        f16 v[IN];
        DEV f16 get(u32 l) const { return v[l]; }
        DEV void set(u32 l, f16 x) { v[l] = x; }
        DEV static u32 row(u32) { return lane() % 16; }
        DEV static u32 k(u32 l) { return first_k() + l; }
    };
    struct B {
        static constexpr u32 SIZE = IN;
        f16 v[IN];
        DEV f16 get(u32 l) const { return v[l]; }
        DEV void set(u32 l, f16 x) { v[l] = x; }
        DEV static u32 k(u32 l) { return first_k() + l; }
        DEV static u32 col(u32) { return lane() % 16; }
    };
    struct C {
        static constexpr u32 SIZE = OUT;
        f32 v[OUT];
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

    DEV static A load_a(const f16* p, u32 ld, HOST_HERE) {
        A a;
        const f16* from = p + lane() % 16 * ld + first_k();
        host::check_aligned<(IN < 8 ? 8 : 16)>(from, file, line);
        memcpy(a.v, from, sizeof a.v);
        return a;
    }
    DEV static B load_bt(const f16* p, u32 ld, HOST_HERE) {
        B b;
        const f16* from = p + lane() % 16 * ld + first_k();
        host::check_aligned<(IN < 8 ? 8 : 16)>(from, file, line);
        memcpy(b.v, from, sizeof b.v);
        return b;
    }
    DEV static B load_b(const f16* p, u32 ld) {
        B b;
        for (u32 l = 0; l < IN; l++) b.v[l] = p[(first_k() + l) * ld + lane() % 16];
        return b;
    }
    DEV static A load_a_lds(const f16* p, u32 ld, HOST_HERE) { return load_a(p, ld, file, line); }
    DEV static B load_bt_lds(const f16* p, u32 ld, HOST_HERE) { return load_bt(p, ld, file, line); }
    // The place of element (row, k) in turned rows (prelude.h).
    DEV static u32 turned(u32 row, u32 k) { return row * 32 + (k / 8 ^ row / 2 % 4) * 8 + k % 8; }
    DEV static A load_a_turned(const f16* v, u32 row, u32 k) {
        A a;
        for (u32 l = 0; l < IN; l++) a.v[l] = v[turned(row + A::row(l), k + A::k(l))];
        return a;
    }
    DEV static B load_bt_turned(const f16* v, u32 col, u32 k) {
        B b;
        for (u32 l = 0; l < IN; l++) b.v[l] = v[turned(col + B::col(l), k + B::k(l))];
        return b;
    }
    DEV static C zero() { return {}; }
    DEV static Folded folded_zero() { return {}; }
    DEV static Folded fold(const C& c) { return {c}; }

    CALLED static C mma(A a, B b, C c, HOST_HERE) {
        struct Operands {
            f16 a[IN], b[IN];
        };
        static_assert(sizeof(Operands) <= host::SLOT_BYTES, "operands fit an exchange");
        host::Lane* me = host::self;
        u32 turn = me->turn;
        me->turn = turn ^ 1;
        memcpy(me->slot[turn], a.v, sizeof a.v);
        memcpy(me->slot[turn] + sizeof a.v, b.v, sizeof b.v);
        host::wait_wave("mma", file, line);
        auto held = [&](u32 from) { return (const Operands*)me->first_of_wave[from].slot[turn]; };
        f32 column[16];
        for (u32 k = 0; k < 16; k++) column[k] = (f32)held(holder(lane() % 16, k))->b[element(k)];
        for (u32 l = 0; l < OUT; l++) {
            u32 row = out_row(l);
            f32 sum = c.v[l];
            for (u32 k = 0; k < 16; k++)
                sum = __builtin_fmaf((f32)held(holder(row, k))->a[element(k)], column[k], sum);
            c.v[l] = sum;
        }
        return c;
    }
    DEV static Folded mma_folded(A a, B b, Folded c, HOST_HERE) { return {mma(a, b, c, file, line)}; }
};

struct Strip {
    static constexpr u32 K_LANES = 16 / Frag::IN, HELD = 1;
    u32x4 v[HELD][2];
    DEV static u32 held(u32) { return lane() % 16; }
    DEV static u32 k_lane() { return K_LANES == 1 ? 0 : lane() / 16; }
    DEV static Frag::C mma(const Strip& a, const Strip& b, Frag::C c, HOST_HERE) {
        for (u32 i = 0; i < 16 / Frag::IN; i++) {
            Frag::A one;
            Frag::B other;
            memcpy(one.v, (const f16*)a.v + i * Frag::IN, sizeof one.v);
            memcpy(other.v, (const f16*)b.v + i * Frag::IN, sizeof other.v);
            c = Frag::mma(one, other, c, file, line);
        }
        return c;
    }
};
