// gemv_mxfp6_e3m2: out[row] = W x[row] (+ bias), W of MXFP6_E3M2 weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"
#include "quant/small_floats.h"

// Two digits of a code take registers.
GEMV_QUANT_AS(KERNEL_TWICE, KERNEL_TWICE, mxfp6_e3m2, MXFP6_E3M2)
