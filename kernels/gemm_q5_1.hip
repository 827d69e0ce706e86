// gemm_q5_1: out[row] = W x[row] (+ bias), W of Q5_1 weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"

GEMM_QUANT(q5_1, Q5_1)
