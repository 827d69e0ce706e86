// NVIDIA's matrix unit: two mma.m16n8k16 side by side make 16x16x16.
//
// Element l of a lane is this element of a 16x16 matrix, with g = lane/4 and t = lane%4:
//   A  row g + 8*(l/2%2), k 2*t + l%2 + 8*(l/4)
//   B  k 2*t + l%2 + 8*(l/2%2), column g + 8*(l/4)
//   C  row g + 8*(l/2%2), column 2*t + l%2 + 8*(l/4)
#pragma once

struct Frag {
    struct A {
        static constexpr u32 SIZE = 8;
        u32 v[4];
        DEV f16 get(u32 l) const { return f16_from_bits((u16)(v[l / 2] >> (16 * (l % 2)))); }
        DEV void set(u32 l, f16 x) {
            u32 shift = 16 * (l % 2);
            v[l / 2] = (v[l / 2] & ~(0xffffu << shift)) | (u32)f16_bits(x) << shift;
        }
        DEV static u32 row(u32 l) { return lane() / 4 + 8 * (l / 2 % 2); }
        DEV static u32 k(u32 l) { return 2 * (lane() % 4) + l % 2 + 8 * (l / 4); }
    };
    struct B {
        static constexpr u32 SIZE = 8;
        u32 v[4];
        DEV f16 get(u32 l) const { return f16_from_bits((u16)(v[l / 2] >> (16 * (l % 2)))); }
        DEV void set(u32 l, f16 x) {
            u32 shift = 16 * (l % 2);
            v[l / 2] = (v[l / 2] & ~(0xffffu << shift)) | (u32)f16_bits(x) << shift;
        }
        DEV static u32 k(u32 l) { return 2 * (lane() % 4) + l % 2 + 8 * (l / 2 % 2); }
        DEV static u32 col(u32 l) { return lane() / 4 + 8 * (l / 4); }
    };
    struct C {
        static constexpr u32 SIZE = 8;
        f32 v[8];
        DEV f32 get(u32 l) const { return v[l]; }
        DEV void set(u32 l, f32 x) { v[l] = x; }
        DEV static u32 row(u32 l) { return lane() / 4 + 8 * (l / 2 % 2); }
        DEV static u32 col(u32 l) { return 2 * (lane() % 4) + l % 2 + 8 * (l / 4); }
    };
    // Both halves of B are multiplied into one half of C.
    struct Folded {
        static constexpr u32 SIZE = 4;
        f32 v[4];
        DEV f32 get(u32 l) const { return v[l]; }
        DEV void set(u32 l, f32 x) { v[l] = x; }
        DEV static u32 row(u32 l) { return lane() / 4 + 8 * (l / 2); }
        DEV static u32 col(u32 l) { return 2 * (lane() % 4) + l % 2; }
        DEV f32 sum(u32 l) const { return v[l]; }
    };

    DEV static A load_a(const f16* p, u32 ld) {
        A a;
        UNROLL for (u32 i = 0; i < 4; i++) a.v[i] = load4(p + A::row(2 * i) * ld + A::k(2 * i));
        return a;
    }
    DEV static B load_bt(const f16* p, u32 ld) {
        B b;
        UNROLL for (u32 i = 0; i < 4; i++) b.v[i] = load4(p + B::col(2 * i) * ld + B::k(2 * i));
        return b;
    }
    DEV static B load_b(const f16* p, u32 ld) {
        B b;
        UNROLL for (u32 i = 0; i < 4; i++) {
            const f16* from = p + B::k(2 * i) * ld + B::col(2 * i);
            b.v[i] = (u32)f16_bits(from[0]) | (u32)f16_bits(from[ld]) << 16;
        }
        return b;
    }
    // Four 8x8 tiles at once: lane 8*i + r names row r of tile i, and tile i lands in v[i].
    DEV static void load_tiles(u32 v[4], const f16* row) {
        u32 at = (u32)__cvta_generic_to_shared(row);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                     : "r"(at)
                     : "memory");
    }
    // Tiles (row, k): (0, 0) (8, 0) (0, 8) (8, 8).
    DEV static A load_a_lds(const f16* p, u32 ld) {
        A a;
        load_tiles(a.v, p + (lane() % 8 + 8 * (lane() / 8 % 2)) * ld + 8 * (lane() / 16));
        return a;
    }
    // Tiles (column, k): (0, 0) (0, 8) (8, 0) (8, 8).
    DEV static B load_bt_lds(const f16* p, u32 ld) {
        B b;
        load_tiles(b.v, p + (lane() % 8 + 8 * (lane() / 16)) * ld + 8 * (lane() / 8 % 2));
        return b;
    }
    // Rows begin at multiples of 16, so the lane's offset `mine` alone decides the turn.
    DEV static A load_a_turned(const f16* tile, u32 row, u32 k) {
        A a;
        const u32 mine = lane() % 8 + 8 * (lane() / 8 % 2), part = (k / 8 + lane() / 16) ^ (mine / 2 % 4);
        load_tiles(a.v, tile + (row + mine) * 32 + part * 8);
        return a;
    }
    DEV static B load_bt_turned(const f16* tile, u32 col, u32 k) {
        B b;
        const u32 mine = lane() % 8 + 8 * (lane() / 16), part = (k / 8 + lane() / 8 % 2) ^ (mine / 2 % 4);
        load_tiles(b.v, tile + (col + mine) * 32 + part * 8);
        return b;
    }
    DEV static C zero() { return {{0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}}; }

    DEV static Folded folded_zero() { return {{0.0f, 0.0f, 0.0f, 0.0f}}; }
    DEV static Folded fold(const C& c) { return {{c.v[0] + c.v[4], c.v[1] + c.v[5], c.v[2] + c.v[6], c.v[3] + c.v[7]}}; }

    // Adds the product with a half of B.
    DEV static void mma_half(f32* d, const A& a, const B& b, u32 half) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "r"(b.v[2 * half]), "r"(b.v[2 * half + 1]));
    }
    DEV static C mma(A a, B b, C c) {
        UNROLL for (u32 half = 0; half < 2; half++) mma_half(c.v + 4 * half, a, b, half);
        return c;
    }
    DEV static Folded mma_folded(A a, B b, Folded c) {
        UNROLL for (u32 half = 0; half < 2; half++) mma_half(c.v, a, b, half);
        return c;
    }
};

struct Strip {
    static constexpr u32 K_LANES = 4, HELD = 2;
    u32x4 v[HELD][2];
    DEV static u32 held(u32 i) { return lane() / 4 + 8 * i; }
    DEV static u32 k_lane() { return lane() % 4; }
    DEV static Frag::C mma(const Strip& a, const Strip& b, Frag::C c) {
        UNROLL for (u32 q = 0; q < 2; q++) {
            const u32x4 &a0 = a.v[0][q], &a8 = a.v[1][q], &b0 = b.v[0][q], &b8 = b.v[1][q];
            c = Frag::mma({{a0.x, a8.x, a0.y, a8.y}}, {{b0.x, b0.y, b8.x, b8.y}}, c);
            c = Frag::mma({{a0.z, a8.z, a0.w, a8.w}}, {{b0.z, b0.w, b8.z, b8.w}}, c);
        }
        return c;
    }
};
