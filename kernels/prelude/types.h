// Small vectors and the array types of LDS, the same on every target: plain structs that one load fills.
#pragma once

template <class T, u32 ALIGN> struct alignas(ALIGN) Pair {
    T x, y;
    DEV T operator[](u32 i) const { return i == 0 ? x : y; }
};

template <class T> struct alignas(16) Quad {
    T x, y, z, w;
    DEV T operator[](u32 i) const { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
};

typedef Pair<u32, 8> u32x2;
typedef Pair<f32, 8> f32x2;
typedef Quad<u32> u32x4;
typedef Quad<i32> i32x4;
typedef Quad<f32> f32x4;

struct bf16 {
    u16 bits;
};

// Allows an array type before a name: Same<f32[4][8]> tile.
template <class T> using Same = T;
