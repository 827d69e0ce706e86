// gemv_iq4_nl: out[row] = W x[row] (+ bias), W of IQ4_NL weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"
#include "quant/small.h"

GEMV_QUANT(iq4_nl, IQ4_NL)
