// gemm_tq2_0: out[row] = W x[row] (+ bias), W of TQ2_0 weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"
#include "quant/small.h"

GEMM_QUANT(tq2_0, TQ2_0)
