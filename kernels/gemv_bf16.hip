// Matrix-vector products of BF16 weights: the entry points that gemv/gemv.h lists.
#include "gemv/gemv.h"

GEMV_FLOAT(bf16, BF16)
