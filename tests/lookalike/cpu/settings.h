// What the environment says about the devices to play, read once.
#pragma once

#include <stdint.h>

#include <string>

namespace lookalike {

struct Settings {
    // ROCMFORGE_LOOKALIKE_DEVICES, 0 to 8; default 1.
    uint32_t devices;
    // ROCMFORGE_LOOKALIKE_MEMORY: bytes of each device; default 4 GiB.
    uint64_t memory;
    // ROCMFORGE_LOOKALIKE_SEED: orders of streams, blocks, waves and lanes; default 1.
    uint64_t seed;
    // ROCMFORGE_LOOKALIKE_THREADS: OS threads that run blocks; default as many as there are processors.
    uint32_t threads;
    // ROCMFORGE_LOOKALIKE_ARCH: what the device says it is; default what the library was built as.
    std::string arch;
    // ROCMFORGE_LOOKALIKE_FAULTS: see faults.h; default none.
    std::string faults;
    // ROCMFORGE_LOOKALIKE_REPORT: a file to which the launches per kernel are appended at exit; default none.
    std::string report;
};

const Settings& settings();

} // namespace lookalike
