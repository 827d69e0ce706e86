// gemv_q4_k_q6_k: out[row] = W x[row] (+ bias), W of Q4_K weights and a third matrix of Q6_K weights
// Contract   gemv/gemv.h
#include "gemv/gemv.h"

GEMV_TWO_TYPES(q4_k_q6_k, Q4_K, Q6_K)
