// gemm_q4_1: out[row] = W x[row] (+ bias), W of Q4_1 weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"

GEMM_QUANT(q4_1, Q4_1)
