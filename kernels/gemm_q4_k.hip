// gemm_q4_k: out[row] = W x[row] (+ bias), W of Q4_K weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"

GEMM_QUANT(q4_k, Q4_K)
