// gemv_q4_1: out[row] = W x[row] (+ bias), W of Q4_1 weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"

GEMV_QUANT(q4_1, Q4_1)
