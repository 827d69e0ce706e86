// Fibers: stacks that one OS thread switches between. A lane of a kernel is one.
#pragma once

#include <stddef.h>

namespace lookalike {

struct Fiber {
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    size_t stack_bytes = 0;
};

// As many fibers' stacks as one block has threads; lives as long as its thread.
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
// Goes on with `to`; returns when something switches back to `from`. A `from` that `ends` is never switched to again.
void switch_fiber(Fiber& from, Fiber& to, bool ends = false);
// First thing on a fresh fiber.
void arrived();
// Forgets what a sanitizer believes to be alive on a stack that will not go on.
void abandon(Fiber& fiber);

} // namespace lookalike
