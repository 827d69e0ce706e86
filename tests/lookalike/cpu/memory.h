// Device memory, pinned memory, registered memory. Callers hold the engine's lock.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "errors.h"

namespace lookalike {

enum class Kind { DEVICE, PINNED, REGISTERED };

struct Range {
    uintptr_t start;
    size_t bytes;
    Kind kind;
    uint32_t device;
};

// Device memory reads as NaN until it is written.
Code allocate(uint32_t device, size_t bytes, void** place);
Code allocate_pinned(uint32_t device, size_t bytes, void** place);
// Frees the range; a later access to it is a fault or meets NaN.
Code release(void* place, Kind kind);
Code register_host(uint32_t device, void* place, size_t bytes);
Code unregister_host(void* place);

uint64_t used_bytes(uint32_t device);
// The range that contains `address`, or null.
const Range* find_range(const void* address);
// Whether a device may access `bytes` bytes from `address`: all of them lie in one range.
bool reachable(const void* address, size_t bytes);

} // namespace lookalike
