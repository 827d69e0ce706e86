// gemm_wide_f16: out[row] = W x[row] (+ bias), W of F16 weights, on the wide matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"

GEMM_WIDE_FLOAT(f16, F16)
