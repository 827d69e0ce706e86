// gemm_mxfp6_e3m2: out[row] = W x[row] (+ bias), W of MXFP6_E3M2 weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"
#include "quant/small_floats.h"

GEMM_QUANT(mxfp6_e3m2, MXFP6_E3M2)
