// gemv_mxfp4: out[row] = W x[row] (+ bias), W of MXFP4 weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"
#include "quant/small_floats.h"

GEMV_QUANT(mxfp4, MXFP4)
