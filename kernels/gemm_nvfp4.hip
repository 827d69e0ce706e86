// gemm_nvfp4: out[row] = W x[row] (+ bias), W of NVFP4 weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"
#include "quant/small_floats.h"

GEMM_QUANT(nvfp4, NVFP4)
