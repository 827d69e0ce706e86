// Settings of the imitated devices, read once from the environment.
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
    // ROCMFORGE_LOOKALIKE_THREADS: OS threads that run blocks; default one per processor.
    uint32_t threads;
    // ROCMFORGE_LOOKALIKE_ARCH: the target that the device reports; default that of the library's wave size.
    std::string arch;
    // ROCMFORGE_LOOKALIKE_FAULTS: see faults.h; default none.
    std::string faults;
    // ROCMFORGE_LOOKALIKE_REPORT: a file to which the launches per kernel are appended at exit; default none.
    std::string report;
};

const Settings& settings();

} // namespace lookalike
