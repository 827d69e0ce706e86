// gemv_q4_k: out[row] = W x[row] (+ bias), W of Q4_K weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"

GEMV_QUANT(q4_k, Q4_K)
