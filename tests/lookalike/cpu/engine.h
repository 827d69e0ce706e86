// Devices, streams and events, and the thread that does what is queued: among the heads of streams that are ready it takes
// one at random (by the seed), so that an order nobody asked for is not kept by chance.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "errors.h"
#include "graph.h"
#include "work.h"

namespace lookalike {

struct Stream;
struct Event;

// Something in a stream's queue.
struct Operation {
    u64 number;
    // Null: at once. Called with the lock held.
    std::function<bool()> ready;
    // Called without it.
    std::function<Code()> run;
    // Called with the lock held once it is over, however it ended.
    std::function<void()> after;
};

struct Stream {
    u32 device;
    // Waits for the null stream and is waited for by it.
    bool blocking;
    bool alive = true;
    bool hung = false;
    // What the operation under way left undone when it began to hang. The executor's alone.
    std::function<Code()> rest;
    std::deque<Operation> queue;
    // While it captures.
    std::shared_ptr<Capture> capture;
    std::vector<u32> tail;
};

struct Event {
    bool alive = true;
    bool timed;
    // Records asked for, and records that took place.
    u64 recorded = 0, done = 0;
    double milliseconds = 0;
    // The capture it was recorded in, and after which nodes.
    std::weak_ptr<Capture> capture;
    bool in_capture = false;
    std::vector<u32> nodes;
};

struct Device {
    // Of a failed kernel, or the device is lost: every call returns it.
    Code error = hipSuccess;
    Stream null_stream;
};

// The one lock over all of this; may be taken again by its holder.
class Locked {
public:
    Locked();
    ~Locked();
    Locked(const Locked&) = delete;
};

// All below are called with the lock held.
std::vector<std::unique_ptr<Device>>& devices();
// Waits until `done`, letting the executor and others work. Work that hangs keeps it waiting.
void wait_until(const std::function<bool()>& done);
// Handles stay known for ever, so that a stale one is told from a live one.
Stream* make_stream(u32 device, bool blocking);
Event* make_event(bool timed);
// Null when it is no stream, or one that was destroyed. A null handle is the device's null stream.
Stream* find_stream(void* handle, u32 device);
Event* find_event(void* handle);
void enqueue(Stream& stream, std::function<Code()> run, std::function<bool()> ready = nullptr,
             std::function<void()> after = nullptr);
bool idle(const Stream& stream);
bool idle(u32 device);
// From now on the device only fails; what is queued is dropped.
void lose(u32 device, Code code);
// What hangs goes on, as if it had only been slow.
void release_hung();
// Work that the faults let fail, hang or run, from the executor's thread.
Code run_scripted(const Work& work, Stream& stream);

} // namespace lookalike
