// Matrix-vector products of F32 weights: the entry points that gemv/gemv.h lists.
#include "gemv/gemv.h"

GEMV_FLOAT(f32, F32)
