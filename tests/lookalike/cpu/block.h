// One block of a kernel on this thread: its lanes as fibers, their waits, its LDS.
#pragma once

#include <string>

#include "prelude/prelude.h"

namespace lookalike {

constexpr u32 THREADS_MAX = 1024;
// 64 KiB, as AMD's GPUs have; with the wide matrix unit as many as devices that have one.
constexpr u32 LDS_BYTES = HAS_WIDE_MATRIX ? 227 << 10 : 64 << 10;

struct Launch {
    const host::Kernel* kernel;
    u32 grid[3];
    u32 threads;
    u32 lds_bytes;
    void* const* arguments;
    // Decides the order of blocks, waves and lanes.
    u64 seed;
};

// Runs one block to its end. Returns the kernel's fault, or an empty text.
std::string run_block(const Launch& launch, const u32 at[3]);

} // namespace lookalike
