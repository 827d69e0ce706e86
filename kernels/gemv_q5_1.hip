// gemv_q5_1: out[row] = W x[row] (+ bias), W of Q5_1 weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"

GEMV_QUANT(q5_1, Q5_1)
