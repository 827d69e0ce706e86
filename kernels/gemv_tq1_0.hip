// gemv_tq1_0: out[row] = W x[row] (+ bias), W of TQ1_0 weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"
#include "quant/small.h"

GEMV_QUANT(tq1_0, TQ1_0)
