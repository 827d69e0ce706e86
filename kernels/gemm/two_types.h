// two_types: out[row] = W x[row] (+ bias), of two matrices of one weight type and a third one of another
//
// Queries and keys are often of one type and values of another. On their own, the few tiles of values fill a small part of a
// device. GEMM_TWO_TYPES(t_u, T, U) makes the entry points of types t and u.
// Shapes     gemm_t_u_x16_m and gemm_wide_t_u_x16_m: as gemm_t_x16_m and gemm_wide_t_x16_m of gemm.h, w2 of type u
// Variants   m: 16 or 32, because each type has stages of its own in LDS; of gemm_wide also 64
// Requires   as gemm.h, for both types
// Launch     as gemm.h
// Alignment  as gemm.h
// Sums in    f32, as gemm.h: with equal splits, the bits of each output are those of its own type's kernel
// Tolerance  0 against the kernels of gemm.h; theirs against f64
// Reference  gemm_u_x16_m, and f64 sums as for gemm.h, in tests/kernels/matmul/gemm_quant.rs
// Moves      as gemm.h
#pragma once
#include "gemm.h"

#if HAS_MATRIX_UNIT

// Last: the type of the third matrix. All threads of a block go one way.
template <class Unit, class T, class Last>
DEV void gemm_of_two(const Matrix& m0, const Matrix& m1, const Matrix& m2, u32 cols, const f16* x, u32 x_stride,
                     const f32* x_scale, u32 rows, u32 out_stride, u32 add, const Splits<Unit::M>& splits) {
    const u32 number = (block_y() * grid_x() + block_x()) / grid_y();
    if (number < ceil_div(m0.n, TILE) + ceil_div(m1.n, TILE)) {
        gemm<Unit, T>(m0, m1, m2, cols, x, x_stride, x_scale, rows, out_stride, add, splits);
    } else {
        gemm<Unit, Last>(m0, m1, m2, cols, x, x_stride, x_scale, rows, out_stride, add, splits);
    }
}

#define GEMM_TWO_LANES(NAME, T, LAST, M)                                                                                       \
    KERNEL_TWICE(256, gemm_##NAME##_x16_##M, const u8* w0, const u8* w1, const u8* w2, u32 n0, u32 n1, u32 n2,                 \
                 const f32* bias0, const f32* bias1, const f32* bias2, u32 cols, const f16* x, u32 x_stride,                   \
                 const f32* x_scale, u32 rows, f32* out, u32 out_stride, u32 add, f32* parts, u32* counters) {                 \
        gemm_of_two<Lanes<M>, T, LAST>({w0, bias0, n0, out}, {w1, bias1, n1, out + n0}, {w2, bias2, n2, out + n0 + n1}, cols,  \
                                       x, x_stride, x_scale, rows, out_stride, add, {parts, counters});                        \
    }
#if HAS_WIDE_MATRIX
#define GEMM_TWO_ACROSS(NAME, T, LAST, M)                                                                                      \
    KERNEL_TWICE(256, gemm_wide_##NAME##_x16_##M, const u8* w0, const u8* w1, const u8* w2, u32 n0, u32 n1, u32 n2,            \
                 const f32* bias0, const f32* bias1, const f32* bias2, u32 cols, const f16* x, const f32* x_scale,             \
                 u32 rows, f32* out, u32 out_stride, u32 add, f32* parts, u32* counters) {                                     \
        gemm_of_two<AcrossWaves<M>, T, LAST>({w0, bias0, n0, out}, {w1, bias1, n1, out + n0},                                  \
                                             {w2, bias2, n2, out + n0 + n1}, cols, x, 0, x_scale, rows, out_stride, add,       \
                                             {parts, counters});                                                               \
    }
#else
#define GEMM_TWO_ACROSS(NAME, T, LAST, M)
#endif
#define GEMM_TWO_TYPES(NAME, T, LAST)                                                                                          \
    GEMM_TWO_LANES(NAME, T, LAST, 16)                                                                                          \
    GEMM_TWO_LANES(NAME, T, LAST, 32)                                                                                          \
    GEMM_TWO_ACROSS(NAME, T, LAST, 16)                                                                                         \
    GEMM_TWO_ACROSS(NAME, T, LAST, 32)                                                                                         \
    GEMM_TWO_ACROSS(NAME, T, LAST, 64)

#else
#define GEMM_TWO_TYPES(NAME, T, LAST)
#endif
