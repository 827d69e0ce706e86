// gemm_iq1_m: out[row] = W x[row] (+ bias), W of IQ1_M weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"
#include "quant/small.h"

GEMM_QUANT(iq1_m, IQ1_M)
