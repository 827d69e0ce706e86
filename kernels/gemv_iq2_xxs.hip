// gemv_iq2_xxs: out[row] = W x[row] (+ bias), W of IQ2_XXS weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"
#include "quant/small.h"

GEMV_QUANT(iq2_xxs, IQ2_XXS)
