// gemv_q5_0: out[row] = W x[row] (+ bias), W of Q5_0 weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"

GEMV_QUANT(q5_0, Q5_0)
