// Matrix-vector products of Q4_1 weights: the entry points that gemv/gemv.h lists.
#include "gemv/gemv.h"

GEMV_QUANT(q4_1, Q4_1)
