// gemv_q5_k: out[row] = W x[row] (+ bias), W of Q5_K weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"

GEMV_QUANT(q5_k, Q5_K)
