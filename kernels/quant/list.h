// The quantised types that kernels read: an entry point's name and the type that decodes it.
//
// A kernel file with one entry point a type writes QUANT_TYPES(MACRO) instead of naming them all. The Rust table of the same
// types is src/backend/hip/kernels/types.rs; products have files of their own, gemv_TYPE.hip
// and gemm_TYPE.hip, so that they compile side by side.
#pragma once

#define QUANT_TYPES(X)                                                                                                         \
    X(q8_0, Q8_0)                                                                                                              \
    X(q4_0, Q4_0)                                                                                                              \
    X(q4_1, Q4_1)                                                                                                              \
    X(q5_0, Q5_0)                                                                                                              \
    X(q5_1, Q5_1)                                                                                                              \
    X(mxfp4, MXFP4)                                                                                                            \
    X(mxfp6_e2m3, MXFP6_E2M3)                                                                                                  \
    X(mxfp6_e3m2, MXFP6_E3M2)                                                                                                  \
    X(nvfp4, NVFP4)                                                                                                            \
    X(q4_k, Q4_K)                                                                                                              \
    X(q5_k, Q5_K)                                                                                                              \
    X(q6_k, Q6_K)                                                                                                              \
    X(q2_k, Q2_K)                                                                                                              \
    X(q3_k, Q3_K)                                                                                                              \
    X(iq4_nl, IQ4_NL)                                                                                                          \
    X(iq4_xs, IQ4_XS)                                                                                                          \
    X(iq3_xxs, IQ3_XXS)                                                                                                        \
    X(iq3_s, IQ3_S)                                                                                                            \
    X(iq2_xxs, IQ2_XXS)                                                                                                        \
    X(iq2_xs, IQ2_XS)                                                                                                          \
    X(iq2_s, IQ2_S)                                                                                                            \
    X(iq1_s, IQ1_S)                                                                                                            \
    X(iq1_m, IQ1_M)                                                                                                            \
    X(tq1_0, TQ1_0)                                                                                                            \
    X(tq2_0, TQ2_0)
