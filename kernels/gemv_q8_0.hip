// gemv_q8_0: out[row] = W x[row] (+ bias), W of Q8_0 weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"

GEMV_QUANT_AS(KERNEL, KERNEL_FOUR_TIMES, q8_0, Q8_0)
