// A grid of blocks over several OS threads.
#pragma once

#include <string>

#include "block.h"

namespace lookalike {

// Runs all blocks in an order that the seed decides. Returns the fault of the first block that failed, or an empty text.
std::string run_grid(const Launch& launch);

} // namespace lookalike
