// gemv_iq4_xs: out[row] = W x[row] (+ bias), W of IQ4_XS weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"
#include "quant/small.h"

GEMV_QUANT(iq4_xs, IQ4_XS)
