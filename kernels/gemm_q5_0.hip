// gemm_q5_0: out[row] = W x[row] (+ bias), W of Q5_0 weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"

GEMM_QUANT(q5_0, Q5_0)
