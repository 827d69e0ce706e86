// gemv_mxfp4: out[row] = W x[row] (+ bias), W of MXFP4 weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"

GEMV_QUANT(mxfp4, MXFP4)
