// gemm_q4_0: out[row] = W x[row] (+ bias), W of Q4_0 weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"

GEMM_QUANT(q4_0, Q4_0)
