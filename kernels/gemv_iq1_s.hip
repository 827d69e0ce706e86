// gemv_iq1_s: out[row] = W x[row] (+ bias), W of IQ1_S weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"
#include "quant/small.h"

GEMV_QUANT(iq1_s, IQ1_S)
