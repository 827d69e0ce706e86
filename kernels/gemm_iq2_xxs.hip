// gemm_iq2_xxs: out[row] = W x[row] (+ bias), W of IQ2_XXS weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"
#include "quant/small.h"

GEMM_QUANT(iq2_xxs, IQ2_XXS)
