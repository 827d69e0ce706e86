// gemm_iq1_s: out[row] = W x[row] (+ bias), W of IQ1_S weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"
#include "quant/small.h"

GEMM_QUANT(iq1_s, IQ1_S)
