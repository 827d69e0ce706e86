// gemv_f32: out[row] = W x[row] (+ bias), W of F32 weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"

GEMV_FLOAT(f32, F32)
