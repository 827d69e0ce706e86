// Devices, streams and events, and the executor: the thread that runs queued work. Of the stream heads that are ready it takes
// one at random (by the seed), so that no order holds by chance that the caller did not ask for.
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

// An entry of a stream's queue.
struct Operation {
    u64 number;
    // Whether it may run; null: at once. Called with the lock held.
    std::function<bool()> ready;
    // Called without the lock.
    std::function<Code()> run;
    // Called with the lock held when the operation has ended, in success or failure.
    std::function<void()> after;
};

struct Stream {
    u32 device;
    // It waits for the null stream, and the null stream waits for it.
    bool blocking;
    bool alive = true;
    bool hung = false;
    // The rest of the running operation, which hangs. Only the executor uses it.
    std::function<Code()> rest;
    std::deque<Operation> queue;
    // Set while the stream captures.
    std::shared_ptr<Capture> capture;
    std::vector<u32> tail;
};

struct Event {
    bool alive = true;
    bool timed;
    // Records queued, and records done.
    u64 recorded = 0, done = 0;
    double milliseconds = 0;
    // The capture in which it was recorded, and the nodes before it.
    std::weak_ptr<Capture> capture;
    bool in_capture = false;
    std::vector<u32> nodes;
};

struct Device {
    // Set when a kernel failed or the device was lost; then every call returns it.
    Code error = hipSuccess;
    Stream null_stream;
};

// The one lock for all of this. Its holder may take it again.
class Locked {
public:
    Locked();
    ~Locked();
    Locked(const Locked&) = delete;
};

// The caller of every function below holds the lock.
std::vector<std::unique_ptr<Device>>& devices();
// Waits until `done` and releases the lock meanwhile. Hung work keeps it waiting.
void wait_until(const std::function<bool()>& done);
// Handles are kept for ever, so that a stale handle is recognised.
Stream* make_stream(u32 device, bool blocking);
Event* make_event(bool timed);
// Null for a handle that is no stream, or whose stream was destroyed. A null handle is the device's null stream.
Stream* find_stream(void* handle, u32 device);
Event* find_event(void* handle);
void enqueue(Stream& stream, std::function<Code()> run, std::function<bool()> ready = nullptr,
             std::function<void()> after = nullptr);
bool idle(const Stream& stream);
bool idle(u32 device);
// Every later call for the device returns `code`; queued work is dropped. hipSuccess repairs the device.
void lose(u32 device, Code code);
// Hung work continues, as if it had only been slow.
void release_hung();
// Runs work on the executor's thread, unless the script of faults makes it fail or hang.
Code run_scripted(const Work& work, Stream& stream);

} // namespace lookalike
