// Matrix-vector products of Q8_0 weights: the entry points that gemv/gemv.h lists.
#include "gemv/gemv.h"

GEMV_QUANT(q8_0, Q8_0)
