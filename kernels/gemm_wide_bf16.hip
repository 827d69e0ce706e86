// gemm_wide_bf16: out[row] = W x[row] (+ bias), W of BF16 weights, on the wide matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"

GEMM_WIDE_FLOAT(bf16, BF16)
