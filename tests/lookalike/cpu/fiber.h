// Fibers: stacks between which one OS thread switches. A lane of a kernel is a fiber.
#pragma once

#include <stddef.h>

extern "C" void lookalike_switch_stacks(void** save, void* load);

namespace lookalike {

struct Fiber {
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    size_t stack_bytes = 0;
};

// The fibers' stacks, one for each thread of the largest block. Lives as long as its OS thread.
class Stacks {
public:
    Stacks(Fiber* fibers, size_t count);
    ~Stacks();
    Stacks(const Stacks&) = delete;

private:
    void* memory;
    size_t bytes;
};

// Makes the next switch to `fiber` call `entry`, which never returns.
void start(Fiber& fiber, void (*entry)());
// Continues with `to`; returns when a fiber switches back to `from`. `ends`: no fiber will switch back to `from`.
#if __has_feature(address_sanitizer)
void switch_fiber(Fiber& from, Fiber& to, bool ends = false);
#else
inline void switch_fiber(Fiber& from, Fiber& to, bool = false) { lookalike_switch_stacks(&from.stack_pointer, to.stack_pointer); }
#endif
// The first call on a fresh fiber.
void arrived();
// Clears the sanitizer's marks on a stack that will not continue.
void abandon(Fiber& fiber);

} // namespace lookalike
