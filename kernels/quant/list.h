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
    X(q4_k, Q4_K)                                                                                                              \
    X(q5_k, Q5_K)                                                                                                              \
    X(q6_k, Q6_K)
