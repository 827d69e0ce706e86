// gemv_iq2_s: out[row] = W x[row] (+ bias), W of IQ2_S weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"
#include "quant/small.h"

GEMV_QUANT(iq2_s, IQ2_S)
