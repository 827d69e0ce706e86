// Matrix-vector products of Q5_0 weights: the entry points that gemv/gemv.h lists.
#include "gemv/gemv.h"

GEMV_QUANT(q5_0, Q5_0)
