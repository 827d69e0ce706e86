// gemm_mxfp6_e2m3: out[row] = W x[row] (+ bias), W of MXFP6_E2M3 weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"
#include "quant/small_floats.h"

GEMM_QUANT(mxfp6_e2m3, MXFP6_E2M3)
