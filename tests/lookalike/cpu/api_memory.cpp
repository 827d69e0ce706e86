// Exported functions: memory, copies and fills.
#include "api.h"

using namespace lookalike;

namespace lookalike {

Code wait_on(u32 device, const std::function<bool()>& done) {
    wait_until([&] { return done() || devices()[device]->error != hipSuccess; });
    return devices()[device]->error;
}

Code submit(Stream& stream, const Work& work) {
    if (stream.capture) return capture_work(stream, work);
    Stream* on = &stream;
    enqueue(stream, [work, on] { return run_scripted(work, *on); });
    return hipSuccess;
}

namespace {

// Runs work on the null stream and waits for it.
Code at_once(u32 device, const char* name, const Work& work) {
    if (Code code = refuse_in_capture(name)) return code;
    Stream& stream = devices()[device]->null_stream;
    submit(stream, work);
    return wait_on(device, [&] { return idle(stream); });
}

Code free_after_work(const char* name, u32 device, void* place, Kind kind) {
    if (Code code = refuse_in_capture(name)) return code;
    if (!place) return hipSuccess;
    const Range* range = find_range(place);
    u32 owner = range ? range->device : device;
    // As HIP documents, all work of the device ends first.
    if (Code code = wait_on(owner, [owner] { return idle(owner); })) return code;
    return release(place, kind);
}

} // namespace
} // namespace lookalike

LOOKALIKE_API hipMalloc(void** place, size_t bytes) {
    return device_call("hipMalloc", [&](u32 device) -> Code {
        if (!place) return hipErrorInvalidValue;
        if (Code code = refuse_in_capture("hipMalloc")) return code;
        return allocate(device, bytes, place);
    });
}

LOOKALIKE_API hipFree(void* place) {
    return device_call("hipFree", [&](u32 device) { return free_after_work("hipFree", device, place, Kind::DEVICE); });
}

LOOKALIKE_API hipHostMalloc(void** place, size_t bytes, u32) {
    return device_call("hipHostMalloc", [&](u32 device) -> Code {
        if (!place) return hipErrorInvalidValue;
        if (Code code = refuse_in_capture("hipHostMalloc")) return code;
        return allocate_pinned(device, bytes, place);
    });
}

LOOKALIKE_API hipHostFree(void* place) {
    return device_call("hipHostFree", [&](u32 device) { return free_after_work("hipHostFree", device, place, Kind::PINNED); });
}

LOOKALIKE_API hipHostRegister(void* place, size_t bytes, u32) {
    return device_call("hipHostRegister", [&](u32 device) { return register_host(device, place, bytes); });
}

LOOKALIKE_API hipHostUnregister(void* place) {
    return device_call("hipHostUnregister", [&](u32) { return unregister_host(place); });
}

LOOKALIKE_API hipHostGetDevicePointer(void** device_place, void* place, u32 flags) {
    return device_call("hipHostGetDevicePointer", [&](u32) -> Code {
        const Range* range = find_range(place);
        if (!device_place || flags != 0 || !range || range->kind == Kind::DEVICE) return hipErrorInvalidValue;
        *device_place = place;
        return hipSuccess;
    });
}

LOOKALIKE_API hipMemGetInfo(size_t* free_bytes, size_t* total) {
    return device_call("hipMemGetInfo", [&](u32 device) -> Code {
        if (!free_bytes || !total) return hipErrorInvalidValue;
        *total = settings().memory;
        *free_bytes = settings().memory - used_bytes(device);
        return hipSuccess;
    });
}

LOOKALIKE_API hipMemcpy(void* to, const void* from, size_t bytes, u32 direction) {
    return device_call("hipMemcpy", [&](u32 device) -> Code {
        Work work;
        if (Code code = make_copy(device, to, from, bytes, direction, work)) return code;
        return at_once(device, "hipMemcpy", work);
    });
}

LOOKALIKE_API hipMemcpyAsync(void* to, const void* from, size_t bytes, u32 direction, void* handle) {
    return stream_call("hipMemcpyAsync", handle, [&](Stream& stream) -> Code {
        Work work;
        if (Code code = make_copy(stream.device, to, from, bytes, direction, work)) return code;
        return submit(stream, work);
    });
}

LOOKALIKE_API hipMemcpyHtoDAsync(void* to, void* from, size_t bytes, void* handle) {
    return hipMemcpyAsync(to, from, bytes, (u32)Direction::HOST_TO_DEVICE, handle);
}

LOOKALIKE_API hipMemcpyDtoHAsync(void* to, void* from, size_t bytes, void* handle) {
    return hipMemcpyAsync(to, from, bytes, (u32)Direction::DEVICE_TO_HOST, handle);
}

LOOKALIKE_API hipMemset(void* to, int value, size_t bytes) {
    return device_call("hipMemset", [&](u32 device) -> Code {
        Work work;
        if (Code code = make_fill(device, to, value, bytes, work)) return code;
        return at_once(device, "hipMemset", work);
    });
}

LOOKALIKE_API hipMemsetAsync(void* to, int value, size_t bytes, void* handle) {
    return stream_call("hipMemsetAsync", handle, [&](Stream& stream) -> Code {
        Work work;
        if (Code code = make_fill(stream.device, to, value, bytes, work)) return code;
        return submit(stream, work);
    });
}
