// gemm_iq3_xxs: out[row] = W x[row] (+ bias), W of IQ3_XXS weights, on the matrix unit
// Contract   gemm/gemm.h
#include "gemm/gemm.h"
#include "quant/small.h"

GEMM_QUANT(iq3_xxs, IQ3_XXS)
