// gemv_iq3_xxs: out[row] = W x[row] (+ bias), W of IQ3_XXS weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"
#include "quant/small.h"

GEMV_QUANT(iq3_xxs, IQ3_XXS)
