// gemm_iq2_s: out[row] = W x[row] (+ bias), W of IQ2_S weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"
#include "quant/small.h"

GEMM_QUANT(iq2_s, IQ2_S)
