#include "block.h"

#include <memory>

#include "fiber.h"
#include "lds.h"

namespace host {
constinit thread_local Lane* self = nullptr;
constinit thread_local const Block* block = nullptr;
Kernel* Kernel::all = nullptr;
} // namespace host

namespace lookalike {
namespace {

constexpr u32 WAVES_MAX = THREADS_MAX / WAVE;

// The place where lanes wait: the first lane to arrive sets it, the others must wait at the same place.
struct Meeting {
    const char* what = nullptr;
    const char* file = nullptr;
    i32 line = 0;
    u32 arrived = 0;

    // Calls of one compilation unit have one copy of the file's name.
    bool is_at(const char* w, const char* f, i32 l) const {
        return line == l && what == w && (file == f || !strcmp(file, f));
    }
    std::string name() const { return std::string(what) + " at " + file + ":" + std::to_string(line); }
};

struct Wave {
    Meeting meeting;
    u32 lanes;
    u64 ready, in_barrier;
};

// The state with which one OS thread runs blocks.
class Worker {
public:
    Worker() : fibers(new Fiber[THREADS_MAX]), lanes(new host::Lane[THREADS_MAX]), stacks(fibers.get(), THREADS_MAX) {}
    std::string run(const Launch& launch, const u32 at[3]);
    void wait_wave(const char* what, const char* file, i32 line);
    void wait_block(const char* file, i32 line);
    // Both never return. They have no noreturn attribute: sanitizers would then unwind what they take for the thread's stack.
    void fault(const std::string& text);
    void finish_lane();
    const Launch* launch = nullptr;
    Lds lds;

private:
    void prepare(const Launch& launch, const u32 at[3]);
    void go_on(bool ends);
    void run_next(Fiber& from, u32 wave, bool ends);
    void cannot_meet(const Wave& wave, const Meeting& here);
    void release_block();
    std::string who_waits() const;
    Fiber& fiber_of(const host::Lane* lane) { return fibers[lane->thread]; }

    std::unique_ptr<Fiber[]> fibers;
    std::unique_ptr<host::Lane[]> lanes;
    Stacks stacks;
    Fiber outside;
    host::Block block = {};
    Wave waves[WAVES_MAX];
    Meeting barrier;
    u32 live = 0, wave_count = 0;
    bool backwards = false;
    std::string failure;
};

constinit thread_local Worker* worker __attribute__((tls_model("initial-exec"))) = nullptr;

void lane_entry() {
    arrived();
    const Launch* launch = worker->launch;
    launch->kernel->call(launch->kernel->function, launch->arguments);
    worker->finish_lane();
}

void Worker::prepare(const Launch& l, const u32 at[3]) {
    launch = &l;
    failure.clear();
    barrier = {};
    live = l.threads;
    wave_count = (l.threads + WAVE - 1) / WAVE;
    // The hardware promises no order of waves or blocks: a missing wait shows in one of the two directions.
    backwards = (l.seed ^ at[0] ^ at[1] ^ at[2]) & 1;
    block = {{at[0], at[1], at[2]}, {l.grid[0], l.grid[1], l.grid[2]}, l.threads};
    for (u32 w = 0; w < wave_count; w++) {
        u32 count = l.threads - w * WAVE < WAVE ? l.threads - w * WAVE : WAVE;
        waves[w] = {{}, count, count == 64 ? ~0ull : (1ull << count) - 1, 0};
    }
    for (u32 i = 0; i < l.threads; i++) {
        host::Lane& lane = lanes[i];
        lane.thread = i;
        lane.lane = i % WAVE;
        lane.wave = i / WAVE;
        lane.turn = 0;
        lane.copies = lane.groups = 0;
        lane.first_of_wave = &lanes[i - i % WAVE];
        start(fibers[i], lane_entry);
    }
    host::block = &block;
    lds.start_block(l.lds_bytes);
}

std::string Worker::run(const Launch& l, const u32 at[3]) {
    prepare(l, at);
    host::self = nullptr;
    go_on(false);
    return failure;
}

// Switches to a lane that can run; returns when this lane is chosen again. If no lane can run, the block is done or deadlocked.
void Worker::go_on(bool ends) {
    u32 at = host::self ? host::self->wave : backwards ? wave_count - 1 : 0;
    u32 seen = 0;
    while (seen < wave_count && !waves[at].ready) {
        at = backwards ? (at == 0 ? wave_count - 1 : at - 1) : (at + 1 == wave_count ? 0 : at + 1);
        seen++;
    }
    Fiber& from = host::self ? fiber_of(host::self) : outside;
    if (seen == wave_count) {
        if (live != 0) fault("deadlock: " + who_waits());
        switch_fiber(from, outside, ends);
        return;
    }
    run_next(from, at, ends);
}

// Switches to the next lane of a wave that has one that can run.
inline void Worker::run_next(Fiber& from, u32 wave, bool ends) {
    u64& ready = waves[wave].ready;
    u32 bit = backwards ? 63 - (u32)__builtin_clzll(ready) : (u32)__builtin_ctzll(ready);
    ready &= ~(1ull << bit);
    host::Lane* me = host::self;
    host::self = &lanes[wave * WAVE + bit];
    if (host::self == me) return;
    switch_fiber(from, fiber_of(host::self), ends);
}

// Out of the way of `wait_wave`, whose frame every switch would load.
__attribute__((noinline, cold)) void Worker::cannot_meet(const Wave& wave, const Meeting& here) {
    if (wave.lanes != WAVE) fault(here.name() + ": only " + std::to_string(wave.lanes) + " lanes of the wave still run");
    fault("lanes of one wave wait at " + wave.meeting.name() + " and " + here.name());
}

void Worker::wait_wave(const char* what, const char* file, i32 line) {
    host::Lane* me = host::self;
    Wave& wave = waves[me->wave];
    Meeting& meeting = wave.meeting;
    if (wave.lanes != WAVE) cannot_meet(wave, {what, file, line});
    if (meeting.arrived == 0) meeting = {what, file, line, 0};
    else if (!meeting.is_at(what, file, line)) cannot_meet(wave, {what, file, line});
    if (++meeting.arrived == WAVE) {
        meeting.arrived = 0;
        wave.ready = (WAVE == 64 ? ~0ull : (1ull << WAVE) - 1) & ~(1ull << me->lane);
        return;
    }
    // Most of a test's time passes here, in switches from one lane to the next.
    if (wave.ready != 0) run_next(fiber_of(me), me->wave, false);
    else go_on(false);
}

void Worker::wait_block(const char* file, i32 line) {
    if (barrier.arrived == 0) barrier = {"barrier", file, line, 0};
    else if (!barrier.is_at(barrier.what, file, line))
        fault("threads of one block wait at " + barrier.name() + " and " + Meeting{"barrier", file, line}.name());
    waves[host::self->wave].in_barrier |= 1ull << host::self->lane;
    if (++barrier.arrived == live) {
        release_block();
        // This lane continues at once.
        waves[host::self->wave].ready &= ~(1ull << host::self->lane);
        return;
    }
    go_on(false);
}

void Worker::release_block() {
    barrier.arrived = 0;
    for (u32 w = 0; w < wave_count; w++) {
        waves[w].ready |= waves[w].in_barrier;
        waves[w].in_barrier = 0;
    }
}

void Worker::finish_lane() {
    Wave& wave = waves[host::self->wave];
    wave.lanes--;
    live--;
    if (wave.meeting.arrived != 0) fault("a lane returned while others of its wave wait at " + wave.meeting.name());
    if (live != 0 && barrier.arrived == live) release_block();
    go_on(true);
}

std::string Worker::who_waits() const {
    std::string text;
    u32 waiting = 0;
    for (u32 w = 0; w < wave_count; w++) {
        waiting += (u32)__builtin_popcountll(waves[w].in_barrier);
        if (waves[w].meeting.arrived == 0) continue;
        text += (text.empty() ? "" : ", ") + std::to_string(waves[w].meeting.arrived) + " of " +
                std::to_string(waves[w].lanes) + " lanes of wave " + std::to_string(w) + " wait in " +
                waves[w].meeting.name();
    }
    if (waiting != 0)
        text += (text.empty() ? "" : ", ") + std::to_string(waiting) + " of " + std::to_string(live) +
                " live threads wait in " + barrier.name();
    return text;
}

void Worker::fault(const std::string& text) {
    failure = text;
    for (u32 i = 0; i < launch->threads; i++) abandon(fibers[i]);
    Fiber gone;
    gone.stack = fibers[0].stack;
    switch_fiber(gone, outside, true);
}

} // namespace

std::string run_block(const Launch& launch, const u32 at[3]) {
    static thread_local std::unique_ptr<Worker> owned;
    if (!owned) {
        owned = std::make_unique<Worker>();
        worker = owned.get();
    }
    std::string failure = worker->run(launch, at);
    worker->lds.end_block();
    return failure;
}

} // namespace lookalike

namespace host {
void wait_wave(const char* what, const char* file, i32 line) { lookalike::worker->wait_wave(what, file, line); }
void wait_block(const char* file, i32 line) { lookalike::worker->wait_block(file, line); }
void fault(const char* text, const char* file, i32 line) {
    lookalike::worker->fault(std::string(text) + " at " + file + ":" + std::to_string(line));
}
void* lds(const void* place, size_t bytes) {
    void* at = lookalike::worker->lds.find(place, bytes);
    if (!at) lookalike::worker->fault("the kernel declares more than 64 KiB of LDS");
    return at;
}
void* lds_dynamic() { return lookalike::worker->lds.dynamic(); }
} // namespace host
