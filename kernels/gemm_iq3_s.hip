// gemm_iq3_s: out[row] = W x[row] (+ bias), W of IQ3_S weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"
#include "quant/small.h"

GEMM_QUANT(iq3_s, IQ3_S)
