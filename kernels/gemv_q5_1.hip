// Matrix-vector products of Q5_1 weights: the entry points that gemv/gemv.h lists.
#include "gemv/gemv.h"

GEMV_QUANT(q5_1, Q5_1)
