// gemm_q8_0: out[row] = W x[row] (+ bias), W of Q8_0 weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"

GEMM_QUANT(q8_0, Q8_0)
