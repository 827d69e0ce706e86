// Counters by name: calls ("hipMalloc"), bytes moved ("bytes.h2d"), kernels run ("kernel.norm_f32").
#pragma once

#include <stdint.h>

namespace lookalike {

void count(const char* name, uint64_t more);
uint64_t counted(const char* name);

} // namespace lookalike
