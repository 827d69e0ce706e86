// Exported functions: streams and events.
#include <time.h>

#include "api.h"

using namespace lookalike;

namespace {

double now_milliseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

constexpr u32 NON_BLOCKING = 1, DISABLE_TIMING = 2;

template <class F> Code event_call(const char* name, void* handle, F body) {
    return device_call(name, [&](u32 device) -> Code {
        Event* event = find_event(handle);
        if (!event) return complain(hipErrorInvalidHandle, "%s: %p is no event, or was destroyed", name, handle);
        return body(*event, device);
    });
}

Code create_stream(const char* name, void** handle, u32 flags) {
    return device_call(name, [&](u32 device) -> Code {
        if (!handle || flags > NON_BLOCKING) return hipErrorInvalidValue;
        *handle = make_stream(device, !(flags & NON_BLOCKING));
        return hipSuccess;
    });
}

Code create_event(const char* name, void** handle, u32 flags) {
    return device_call(name, [&](u32) -> Code {
        if (!handle) return hipErrorInvalidValue;
        *handle = make_event(!(flags & DISABLE_TIMING));
        return hipSuccess;
    });
}

} // namespace

LOOKALIKE_API hipStreamCreate(void** handle) { return create_stream("hipStreamCreate", handle, 0); }
LOOKALIKE_API hipStreamCreateWithFlags(void** handle, u32 flags) {
    return create_stream("hipStreamCreateWithFlags", handle, flags);
}
LOOKALIKE_API hipStreamCreateWithPriority(void** handle, u32 flags, int) {
    return create_stream("hipStreamCreateWithPriority", handle, flags);
}

LOOKALIKE_API hipStreamDestroy(void* handle) {
    return stream_call("hipStreamDestroy", handle, [&](Stream& stream) -> Code {
        if (!handle) return complain(hipErrorInvalidHandle, "the null stream cannot be destroyed");
        if (Code code = refuse_for_stream(stream, "hipStreamDestroy")) return code;
        // Queued work still runs.
        stream.alive = false;
        return hipSuccess;
    });
}

LOOKALIKE_API hipStreamQuery(void* handle) {
    return stream_call("hipStreamQuery", handle, [](Stream& stream) -> Code {
        if (Code code = refuse_for_stream(stream, "hipStreamQuery")) return code;
        return idle(stream) ? hipSuccess : hipErrorNotReady;
    });
}

LOOKALIKE_API hipStreamSynchronize(void* handle) {
    return stream_call("hipStreamSynchronize", handle, [](Stream& stream) -> Code {
        if (Code code = refuse_for_stream(stream, "hipStreamSynchronize")) return code;
        return wait_on(stream.device, [&] { return idle(stream); });
    });
}

LOOKALIKE_API hipStreamWaitEvent(void* handle, void* event_handle, u32 flags) {
    return stream_call("hipStreamWaitEvent", handle, [&](Stream& stream) -> Code {
        Event* event = find_event(event_handle);
        if (!event) return complain(hipErrorInvalidHandle, "hipStreamWaitEvent: %p is no event", event_handle);
        if (flags != 0) return hipErrorInvalidValue;
        if (stream.capture || event->in_capture) return capture_wait(stream, *event);
        // Waits for the latest record so far; an event without a record needs no wait.
        u64 wanted = event->recorded;
        enqueue(stream, nullptr, [event, wanted] { return event->done >= wanted; });
        return hipSuccess;
    });
}

LOOKALIKE_API hipEventCreate(void** handle) { return create_event("hipEventCreate", handle, 0); }
LOOKALIKE_API hipEventCreateWithFlags(void** handle, u32 flags) {
    return create_event("hipEventCreateWithFlags", handle, flags);
}

LOOKALIKE_API hipEventDestroy(void* handle) {
    return event_call("hipEventDestroy", handle, [](Event& event, u32) {
        event.alive = false;
        return hipSuccess;
    });
}

LOOKALIKE_API hipEventRecord(void* handle, void* stream_handle) {
    return stream_call("hipEventRecord", stream_handle, [&](Stream& stream) -> Code {
        Event* event = find_event(handle);
        if (!event) return complain(hipErrorInvalidHandle, "hipEventRecord: %p is no event", handle);
        if (stream.capture) return capture_record(stream, *event);
        event->in_capture = false;
        u64 number = ++event->recorded;
        enqueue(stream, nullptr, nullptr, [event, number] {
            if (event->done < number) event->done = number;
            event->milliseconds = now_milliseconds();
        });
        return hipSuccess;
    });
}

LOOKALIKE_API hipEventQuery(void* handle) {
    return event_call("hipEventQuery", handle, [](Event& event, u32) -> Code {
        if (event.in_capture) return complain(hipErrorCapturedEvent, "hipEventQuery of a captured event");
        return event.done >= event.recorded ? hipSuccess : hipErrorNotReady;
    });
}

LOOKALIKE_API hipEventSynchronize(void* handle) {
    return event_call("hipEventSynchronize", handle, [](Event& event, u32 device) -> Code {
        if (event.in_capture) return complain(hipErrorCapturedEvent, "hipEventSynchronize of a captured event");
        u64 wanted = event.recorded;
        return wait_on(device, [&] { return event.done >= wanted; });
    });
}

LOOKALIKE_API hipEventElapsedTime(float* milliseconds, void* from, void* to) {
    return device_call("hipEventElapsedTime", [&](u32) -> Code {
        Event *first = find_event(from), *second = find_event(to);
        if (!first || !second) return complain(hipErrorInvalidHandle, "hipEventElapsedTime: no event");
        if (!milliseconds || !first->timed || !second->timed || first->recorded == 0 || second->recorded == 0)
            return complain(hipErrorInvalidHandle, "hipEventElapsedTime: an event without a time");
        if (first->done < first->recorded || second->done < second->recorded) return hipErrorNotReady;
        *milliseconds = (float)(second->milliseconds - first->milliseconds);
        return hipSuccess;
    });
}

LOOKALIKE_API hipStreamBeginCapture(void* handle, u32 mode) {
    return stream_call("hipStreamBeginCapture", handle, [&](Stream& stream) -> Code {
        if (!handle) return complain(hipErrorStreamCaptureUnsupported, "the null stream cannot capture");
        return begin_capture(stream, mode);
    });
}

LOOKALIKE_API hipStreamEndCapture(void* handle, void** graph) {
    return stream_call("hipStreamEndCapture", handle, [&](Stream& stream) -> Code {
        return graph ? end_capture(stream, (Graph**)graph) : hipErrorInvalidValue;
    });
}

LOOKALIKE_API hipStreamIsCapturing(void* handle, u32* status) {
    return stream_call("hipStreamIsCapturing", handle, [&](Stream& stream) -> Code {
        if (!status) return hipErrorInvalidValue;
        *status = !stream.capture ? 0 : stream.capture->invalid ? 2 : 1;
        return hipSuccess;
    });
}
