// gemm_tq1_0: out[row] = W x[row] (+ bias), W of TQ1_0 weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"
#include "quant/small.h"

GEMM_QUANT(tq1_0, TQ1_0)
