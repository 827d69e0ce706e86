// gemm_q6_k: out[row] = W x[row] (+ bias), W of Q6_K weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"

GEMM_QUANT(q6_k, Q6_K)
