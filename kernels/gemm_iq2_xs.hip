// gemm_iq2_xs: out[row] = W x[row] (+ bias), W of IQ2_XS weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"
#include "quant/small.h"

GEMM_QUANT(iq2_xs, IQ2_XS)
