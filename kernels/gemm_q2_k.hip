// gemm_q2_k: out[row] = W x[row] (+ bias), W of Q2_K weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"
#include "quant/small.h"

GEMM_QUANT(q2_k, Q2_K)
