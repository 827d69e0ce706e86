// gemv_tq2_0: out[row] = W x[row] (+ bias), W of TQ2_0 weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"
#include "quant/small.h"

GEMV_QUANT(tq2_0, TQ2_0)
