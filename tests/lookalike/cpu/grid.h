// A grid of blocks over several OS threads.
#pragma once

#include <string>

#include "block.h"

namespace lookalike {

// Runs all blocks, in an order that the seed decides. Empty, or what went wrong in the first block that failed.
std::string run_grid(const Launch& launch);

} // namespace lookalike
