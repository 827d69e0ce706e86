// gemv_q6_k: out[row] = W x[row] (+ bias), W of Q6_K weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"

GEMV_QUANT(q6_k, Q6_K)
