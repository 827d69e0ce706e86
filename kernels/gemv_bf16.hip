// gemv_bf16: out[row] = W x[row] (+ bias), W of BF16 weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"

GEMV_FLOAT(bf16, BF16)
