// Matrix-vector products of Q4_K weights: the entry points that gemv/gemv.h lists.
#include "gemv/gemv.h"

GEMV_QUANT(q4_k, Q4_K)
