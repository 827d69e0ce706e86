// gemv_q2_k: out[row] = W x[row] (+ bias), W of Q2_K weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"
#include "quant/small.h"

GEMV_QUANT(q2_k, Q2_K)
