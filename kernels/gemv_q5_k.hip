// Matrix-vector products of Q5_K weights: the entry points that gemv/gemv.h lists.
#include "gemv/gemv.h"

GEMV_QUANT(q5_k, Q5_K)
