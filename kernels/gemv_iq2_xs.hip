// gemv_iq2_xs: out[row] = W x[row] (+ bias), W of IQ2_XS weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"
#include "quant/small.h"

GEMV_QUANT(iq2_xs, IQ2_XS)
