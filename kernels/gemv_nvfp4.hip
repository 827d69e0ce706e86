// gemv_nvfp4: out[row] = W x[row] (+ bias), W of NVFP4 weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"
#include "quant/small_floats.h"

GEMV_QUANT(nvfp4, NVFP4)
