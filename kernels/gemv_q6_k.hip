// Matrix-vector products of Q6_K weights: the entry points that gemv/gemv.h lists.
#include "gemv/gemv.h"

GEMV_QUANT(q6_k, Q6_K)
