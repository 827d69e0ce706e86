// Matrix-vector products of Q4_0 weights: the entry points that gemv/gemv.h lists.
#include "gemv/gemv.h"

GEMV_QUANT(q4_0, Q4_0)
