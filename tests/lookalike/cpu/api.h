// The frame of every exported function: it counts the call, obeys the script of faults, takes the lock and keeps the last
// error.
#pragma once

#include <string.h>

#include "counters.h"
#include "engine.h"
#include "faults.h"
#include "memory.h"
#include "settings.h"

#define LOOKALIKE_API extern "C" __attribute__((visibility("default"))) lookalike::Code

namespace lookalike {

extern thread_local u32 current_device;
extern thread_local Code last_error;

template <class F> Code call(const char* name, F body) {
    count(name, 1);
    Fault fault = next_fault(name);
    Locked guard;
    Code code;
    if (fault.kind == Fault::RETURN) code = fault.code;
    else if (fault.kind == Fault::LOST) {
        for (u32 i = 0; i < devices().size(); i++) lose(i, fault.code);
        code = fault.code;
    } else if (devices().empty()) code = hipErrorNoDevice;
    else {
        // The call hangs: it waits for ever on its own thread. Other threads and the executor go on.
        if (fault.kind == Fault::HANG) wait_until([] { return false; });
        code = body();
    }
    if (code != hipSuccess && code != hipErrorNotReady) last_error = code;
    return code;
}

// As `call`, for functions that need a working device.
template <class F> Code device_call(const char* name, F body) {
    return call(name, [&]() -> Code {
        Code broken = devices()[current_device]->error;
        return broken != hipSuccess ? broken : body(current_device);
    });
}

// As `device_call`, with the stream that the handle names.
template <class F> Code stream_call(const char* name, void* handle, F body) {
    return device_call(name, [&](u32 device) -> Code {
        Stream* stream = find_stream(handle, device);
        if (!stream) return complain(hipErrorInvalidHandle, "%s: %p is no stream, or was destroyed", name, handle);
        Code broken = devices()[stream->device]->error;
        return broken != hipSuccess ? broken : body(*stream);
    });
}

// Queues work on a stream, or adds it to the stream's capture.
Code submit(Stream& stream, const Work& work);
// Waits for `done`. Returns the device's error if the device fails meanwhile.
Code wait_on(u32 device, const std::function<bool()>& done);

} // namespace lookalike
