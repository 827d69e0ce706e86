#include "engine.h"

#include <time.h>

#include <condition_variable>
#include <thread>
#include <unordered_set>

#include "counters.h"
#include "faults.h"
#include "settings.h"

namespace lookalike {
namespace {

// Never destroyed: threads of the process may still call while it ends.
struct Engine {
    std::recursive_mutex lock;
    std::condition_variable_any changed;
    std::vector<std::unique_ptr<Device>> devices;
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<std::unique_ptr<Event>> events;
    std::unordered_set<void*> stream_handles, event_handles;
    u64 number = 0, random;

    Engine() : random(settings().seed * 0x9e3779b97f4a7c15ull + 1) {
        for (u32 i = 0; i < settings().devices; i++) {
            devices.push_back(std::make_unique<Device>());
            devices.back()->null_stream.device = i;
            devices.back()->null_stream.blocking = true;
        }
        std::thread([this] { execute(); }).detach();
    }
    u64 next_random() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        return random;
    }
    Stream* choose();
    bool may_run(const Stream& stream, bool is_null) const;
    void execute();
};

Engine& engine() {
    static Engine& only = *new Engine;
    return only;
}

// The null stream's work waits for all earlier work of blocking streams, and theirs for the null stream's.
bool Engine::may_run(const Stream& stream, bool is_null) const {
    if (stream.queue.empty()) return false;
    if (stream.hung && devices[stream.device]->error == hipSuccess) return false;
    u64 number = stream.queue.front().number;
    const Stream& null_stream = devices[stream.device]->null_stream;
    if (is_null) {
        for (auto& other : streams)
            if (other->device == stream.device && other->blocking && !other->queue.empty() &&
                other->queue.front().number < number)
                return false;
    } else if (stream.blocking && !null_stream.queue.empty() && null_stream.queue.front().number < number) {
        return false;
    }
    const Operation& head = stream.queue.front();
    return !head.ready || head.ready() || devices[stream.device]->error != hipSuccess;
}

Stream* Engine::choose() {
    std::vector<Stream*> ready;
    for (auto& device : devices)
        if (may_run(device->null_stream, true)) ready.push_back(&device->null_stream);
    for (auto& stream : streams)
        if (may_run(*stream, false)) ready.push_back(stream.get());
    return ready.empty() ? nullptr : ready[next_random() % ready.size()];
}

void Engine::execute() {
    std::unique_lock<std::recursive_mutex> guard(lock);
    for (;;) {
        Stream* stream = choose();
        if (!stream) {
            changed.wait(guard);
            continue;
        }
        Device& device = *devices[stream->device];
        Operation& head = stream->queue.front();
        if (device.error == hipSuccess) {
            guard.unlock();
            Code code = head.run ? head.run() : hipSuccess;
            guard.lock();
            if (code != hipSuccess && device.error == hipSuccess) device.error = code;
            if (stream->rest && device.error == hipSuccess) {
                // It stays at the head of its queue until release_hung().
                head.run = std::move(stream->rest);
                stream->rest = nullptr;
                stream->hung = true;
                continue;
            }
        }
        stream->hung = false;
        stream->rest = nullptr;
        if (head.after) head.after();
        stream->queue.pop_front();
        changed.notify_all();
    }
}

} // namespace

Locked::Locked() { engine().lock.lock(); }
Locked::~Locked() { engine().lock.unlock(); }

std::vector<std::unique_ptr<Device>>& devices() { return engine().devices; }

void wait_until(const std::function<bool()>& done) { engine().changed.wait(engine().lock, done); }

Stream* make_stream(u32 device, bool blocking) {
    auto stream = std::make_unique<Stream>();
    stream->device = device;
    stream->blocking = blocking;
    engine().stream_handles.insert(stream.get());
    engine().streams.push_back(std::move(stream));
    return engine().streams.back().get();
}

Event* make_event(bool timed) {
    auto event = std::make_unique<Event>();
    event->timed = timed;
    engine().event_handles.insert(event.get());
    engine().events.push_back(std::move(event));
    return engine().events.back().get();
}

Stream* find_stream(void* handle, u32 device) {
    if (!handle) return &engine().devices[device]->null_stream;
    if (!engine().stream_handles.count(handle)) return nullptr;
    Stream* stream = (Stream*)handle;
    return stream->alive ? stream : nullptr;
}

Event* find_event(void* handle) {
    if (!engine().event_handles.count(handle)) return nullptr;
    Event* event = (Event*)handle;
    return event->alive ? event : nullptr;
}

void enqueue(Stream& stream, std::function<Code()> run, std::function<bool()> ready, std::function<void()> after) {
    stream.queue.push_back({++engine().number, std::move(ready), std::move(run), std::move(after)});
    engine().changed.notify_all();
}

bool idle(const Stream& stream) { return stream.queue.empty(); }

bool idle(u32 device) {
    if (!engine().devices[device]->null_stream.queue.empty()) return false;
    for (auto& stream : engine().streams)
        if (stream->device == device && !stream->queue.empty()) return false;
    return true;
}

void lose(u32 device, Code code) {
    engine().devices[device]->error = code;
    engine().changed.notify_all();
}

void release_hung() {
    for (auto& device : engine().devices) device->null_stream.hung = false;
    for (auto& stream : engine().streams) stream->hung = false;
    engine().changed.notify_all();
}

Code run_scripted(const Work& work, Stream& stream) {
    u64 seed;
    {
        Locked guard;
        seed = engine().next_random();
    }
    Fault fault;
    if (work.kind == Work::KERNEL) fault = next_fault(std::string("kernel.") + work.kernel->name);
    switch (fault.kind) {
    case Fault::NONE: return run(work, seed);
    case Fault::RETURN: return fault.code;
    case Fault::LOST: {
        Locked guard;
        for (u32 i = 0; i < devices().size(); i++) lose(i, fault.code);
        return fault.code;
    }
    case Fault::HANG: stream.rest = [work, seed] { return run(work, seed); }; return hipSuccess;
    }
    return hipErrorUnknown;
}

} // namespace lookalike
