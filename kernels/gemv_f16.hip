// Matrix-vector products of F16 weights: the entry points that gemv/gemv.h lists.
#include "gemv/gemv.h"

GEMV_FLOAT(f16, F16)
