// gemv_iq1_m: out[row] = W x[row] (+ bias), W of IQ1_M weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"
#include "quant/small.h"

GEMV_QUANT(iq1_m, IQ1_M)
