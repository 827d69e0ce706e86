// gemm_iq4_xs: out[row] = W x[row] (+ bias), W of IQ4_XS weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"
#include "quant/small.h"

GEMM_QUANT(iq4_xs, IQ4_XS)
