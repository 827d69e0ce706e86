// gemv_iq3_s: out[row] = W x[row] (+ bias), W of IQ3_S weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"
#include "quant/small.h"

GEMV_QUANT(iq3_s, IQ3_S)
