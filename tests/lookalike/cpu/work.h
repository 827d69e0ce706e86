// Work for a device: a kernel, a copy or a fill. Streams queue it, graphs hold it.
#pragma once

#include <stddef.h>

#include <vector>

#include "errors.h"
#include "prelude/prelude.h"

namespace lookalike {

// The numbers of hipMemcpyKind.
enum class Direction : uint32_t { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT };

struct Work {
    enum Kind { KERNEL, COPY, FILL } kind;
    u32 device;

    host::Kernel* kernel = nullptr;
    u32 grid[3] = {}, block[3] = {};
    u32 lds_bytes = 0;
    // Each argument at a multiple of 8 bytes, with its value at the launch.
    std::vector<u64> arguments;

    void* to = nullptr;
    const void* from = nullptr;
    size_t bytes = 0;
    Direction direction = Direction::DEFAULT;
    int value = 0;
};

// Makes work of a launch; the checks are those of the strictest device.
Code make_launch(u32 device, host::Kernel* kernel, const u32 grid[3], const u32 block[3], u32 lds_bytes, void** parameters,
                 void** extra, Work& work);
Code make_copy(u32 device, void* to, const void* from, size_t bytes, u32 direction, Work& work);
Code make_fill(u32 device, void* to, int value, size_t bytes, Work& work);

// Runs the work on the executor's thread, without the engine's lock. Checks its memory again, which may have been freed.
Code run(const Work& work, u64 seed);

} // namespace lookalike
