// gemm_q3_k: out[row] = W x[row] (+ bias), W of Q3_K weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"
#include "quant/small.h"

GEMM_QUANT(q3_k, Q3_K)
