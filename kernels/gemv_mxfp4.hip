// Matrix-vector products of MXFP4 weights: the entry points that gemv/gemv.h lists.
#include "gemv/gemv.h"

GEMV_QUANT(mxfp4, MXFP4)
