// gemm_mxfp4: out[row] = W x[row] (+ bias), W of MXFP4 weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"
#include "quant/small_floats.h"

GEMM_QUANT(mxfp4, MXFP4)
