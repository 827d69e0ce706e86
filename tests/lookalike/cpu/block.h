// One block of a kernel on this thread: its lanes as fibers, what they wait for, its LDS.
#pragma once

#include <string>

#include "prelude/prelude.h"

namespace lookalike {

constexpr u32 THREADS_MAX = 1024;
constexpr u32 LDS_BYTES = 64 << 10;

struct Launch {
    const host::Kernel* kernel;
    u32 grid[3];
    u32 threads;
    u32 lds_bytes;
    void* const* arguments;
    // Decides in which order blocks, waves and lanes run.
    u64 seed;
};

// Runs one block to its end. Empty, or what the kernel did wrong.
std::string run_block(const Launch& launch, const u32 at[3]);

} // namespace lookalike
