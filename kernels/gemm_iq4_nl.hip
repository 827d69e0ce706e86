// gemm_iq4_nl: out[row] = W x[row] (+ bias), W of IQ4_NL weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"
#include "quant/small.h"

GEMM_QUANT(iq4_nl, IQ4_NL)
