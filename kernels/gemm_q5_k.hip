// gemm_q5_k: out[row] = W x[row] (+ bias), W of Q5_K weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"

GEMM_QUANT(q5_k, Q5_K)
