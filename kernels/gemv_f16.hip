// gemv_f16: out[row] = W x[row] (+ bias), W of F16 weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"

GEMV_FLOAT(f16, F16)
