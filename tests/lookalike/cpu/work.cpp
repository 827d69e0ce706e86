#include "work.h"

#include <string.h>

#include "counters.h"
#include "engine.h"
#include "grid.h"
#include "memory.h"

namespace lookalike {
namespace {

constexpr u32 GRID_Y_MAX = 65535;

Code check_shape(const char* name, u32 threads_max, const u32 grid[3], const u32 block[3], u32 lds_bytes) {
    for (u32 i = 0; i < 3; i++)
        if (grid[i] == 0 || block[i] == 0)
            return complain(hipErrorInvalidConfiguration, "%s: a side of the grid or block is 0", name);
    if (block[1] != 1 || block[2] != 1)
        return complain(hipErrorInvalidConfiguration, "%s: blocks have one dimension here", name);
    if (block[0] > threads_max)
        return complain(hipErrorInvalidConfiguration, "%s: %u threads a block, its maximum is %u", name, block[0], threads_max);
    // AMD counts a grid's threads in 32 bits; NVIDIA takes 65535 blocks in y and z.
    if ((u64)grid[0] * block[0] >> 32 || grid[1] > GRID_Y_MAX || grid[2] > GRID_Y_MAX)
        return complain(hipErrorInvalidConfiguration, "%s: a grid of %u x %u x %u is too large", name, grid[0], grid[1], grid[2]);
    if (lds_bytes > LDS_BYTES)
        return complain(hipErrorInvalidConfiguration, "%s: %u bytes of dynamic LDS are too many", name, lds_bytes);
    return hipSuccess;
}

// Addresses of the arguments, in order.
std::vector<void*> places(const Work& work) {
    std::vector<void*> found;
    size_t at = 0;
    for (u32 i = 0; i < work.kernel->arguments; i++) {
        found.push_back((char*)work.arguments.data() + at);
        at += (work.kernel->size[i] + 7) / 8 * 8;
    }
    return found;
}

Code check_pointers(const Work& work, const std::vector<void*>& arguments) {
    Locked engine;
    for (u32 i = 0; i < work.kernel->arguments; i++) {
        if (!work.kernel->pointer[i]) continue;
        void* address;
        memcpy(&address, arguments[i], sizeof address);
        const Range* range = address ? find_range(address) : nullptr;
        if (address && !range)
            return complain(hipErrorIllegalAddress, "%s: argument %u is %p, which is not allocated", work.kernel->name, i,
                            address);
        if (range && range->kind == Kind::DEVICE && range->device != work.device)
            return complain(hipErrorIllegalAddress, "%s on device %u: argument %u is memory of device %u", work.kernel->name,
                            work.device, i, range->device);
    }
    return hipSuccess;
}

Code run_kernel(const Work& work, u64 seed) {
    std::vector<void*> arguments = places(work);
    if (Code code = check_pointers(work, arguments)) return code;
    Launch launch = {work.kernel, {work.grid[0], work.grid[1], work.grid[2]}, work.block[0], work.lds_bytes, arguments.data(),
                     seed};
    std::string text = run_grid(launch);
    __atomic_fetch_add(&work.kernel->launches, 1, __ATOMIC_RELAXED);
    if (text.empty()) return hipSuccess;
    return complain(hipErrorLaunchFailure, "%s: %s", work.kernel->name, text.c_str());
}

bool on_device(const void* address) {
    const Range* range = find_range(address);
    return range && range->kind == Kind::DEVICE;
}

// Checks both sides of a copy against its direction, which says which side is device memory.
Code check_copy(const Work& work) {
    struct {
        const char* name;
        const void* address;
        bool wants_device;
    } sides[2] = {
        {"destination", work.to,
         work.direction == Direction::HOST_TO_DEVICE || work.direction == Direction::DEVICE_TO_DEVICE},
        {"source", work.from,
         work.direction == Direction::DEVICE_TO_HOST || work.direction == Direction::DEVICE_TO_DEVICE},
    };
    for (auto& side : sides) {
        const Range* range = find_range(side.address);
        if (range && !reachable(side.address, work.bytes))
            return complain(hipErrorInvalidValue, "a copy of %zu bytes is more than the %s holds", work.bytes, side.name);
        if (work.direction == Direction::DEFAULT) continue;
        if (side.wants_device && !range)
            return complain(hipErrorInvalidValue, "a copy of %zu bytes: the %s %p is not allocated", work.bytes, side.name,
                            side.address);
        if (!side.wants_device && range && range->kind == Kind::DEVICE)
            return complain(hipErrorInvalidMemcpyDirection, "a copy of %zu bytes: the %s is device memory", work.bytes,
                            side.name);
    }
    return hipSuccess;
}

Code run_copy(const Work& work) {
    {
        Locked engine;
        if (check_copy(work)) return hipErrorIllegalAddress;
        const char* what = on_device(work.to) ? (on_device(work.from) ? "bytes.d2d" : "bytes.h2d")
                                              : (on_device(work.from) ? "bytes.d2h" : "bytes.h2h");
        count(what, work.bytes);
    }
    memmove(work.to, work.from, work.bytes);
    return hipSuccess;
}

Code run_fill(const Work& work) {
    {
        Locked engine;
        if (!reachable(work.to, work.bytes))
            return complain(hipErrorIllegalAddress, "%zu bytes at %p are not all allocated", work.bytes, work.to);
        count("bytes.fill", work.bytes);
    }
    memset(work.to, work.value, work.bytes);
    return hipSuccess;
}

} // namespace

Code make_launch(u32 device, host::Kernel* kernel, const u32 grid[3], const u32 block[3], u32 lds_bytes, void** parameters,
                 void** extra, Work& work) {
    if (Code code = check_shape(kernel->name, kernel->threads_max, grid, block, lds_bytes)) return code;
    if (extra) return complain(hipErrorNotSupported, "%s: arguments as one buffer are not supported", kernel->name);
    if (!parameters && kernel->arguments != 0) return complain(hipErrorInvalidValue, "%s: no arguments", kernel->name);
    work.kind = Work::KERNEL;
    work.device = device;
    work.kernel = kernel;
    memcpy(work.grid, grid, sizeof work.grid);
    memcpy(work.block, block, sizeof work.block);
    work.lds_bytes = lds_bytes;
    work.arguments.clear();
    for (u32 i = 0; i < kernel->arguments; i++) {
        if (!parameters[i]) return complain(hipErrorInvalidValue, "%s: argument %u is missing", kernel->name, i);
        size_t at = work.arguments.size();
        work.arguments.resize(at + (kernel->size[i] + 7) / 8);
        memcpy(&work.arguments[at], parameters[i], kernel->size[i]);
    }
    return hipSuccess;
}

Code make_copy(u32 device, void* to, const void* from, size_t bytes, u32 direction, Work& work) {
    if (direction > (u32)Direction::DEFAULT)
        return complain(hipErrorInvalidMemcpyDirection, "a copy with the unknown direction %u", direction);
    work.kind = Work::COPY;
    work.device = device;
    work.to = to;
    work.from = from;
    work.bytes = bytes;
    work.direction = (Direction)direction;
    if (bytes == 0) return hipSuccess;
    if (!to || !from) return complain(hipErrorInvalidValue, "a copy from or to a null address");
    Locked engine;
    return check_copy(work);
}

Code make_fill(u32 device, void* to, int value, size_t bytes, Work& work) {
    work.kind = Work::FILL;
    work.device = device;
    work.to = to;
    work.value = value;
    work.bytes = bytes;
    if (bytes == 0) return hipSuccess;
    Locked engine;
    return reachable(to, bytes) ? hipSuccess : complain(hipErrorInvalidValue, "%zu bytes at %p are not all allocated", bytes, to);
}

Code run(const Work& work, u64 seed) {
    if (work.kind == Work::KERNEL) return run_kernel(work, seed);
    if (work.bytes == 0) return hipSuccess;
    return work.kind == Work::COPY ? run_copy(work) : run_fill(work);
}

} // namespace lookalike
