// gemv_q3_k: out[row] = W x[row] (+ bias), W of Q3_K weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"
#include "quant/small.h"

GEMV_QUANT(q3_k, Q3_K)
