// gemv_q4_0: out[row] = W x[row] (+ bias), W of Q4_0 weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"

GEMV_QUANT(q4_0, Q4_0)
