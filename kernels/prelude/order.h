// The order in which a compiler issues instructions.
#pragma once
#include "prelude.h"

// No instruction moves across. Between loads for later and arithmetic it keeps those loads in flight: clang 19 for amdgcn moved
// them behind the arithmetic, and a pass of gemv_q4_k took two latencies instead of one.
#if defined(__AMDGCN__)
DEV void keep_order() { __builtin_amdgcn_sched_barrier(0); }
#else
DEV void keep_order() {}
#endif
