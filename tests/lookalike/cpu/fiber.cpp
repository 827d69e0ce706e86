#include "fiber.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#if __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define WITH_ASAN 1
#endif

#if !defined(__x86_64__)
#error "switching fibers is written for x86-64; port switch_stacks and start"
#endif

// Pushes the callee-saved registers onto the old stack and pops them from the new stack.
__asm__(".text\n"
        ".hidden lookalike_switch_stacks\n"
        ".globl lookalike_switch_stacks\n"
        ".type lookalike_switch_stacks,@function\n"
        "lookalike_switch_stacks:\n"
        " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
        " mov %rsp,(%rdi)\n mov %rsi,%rsp\n"
        " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n"
        " ret\n"
        ".size lookalike_switch_stacks,.-lookalike_switch_stacks\n");

namespace lookalike {
namespace {
constexpr size_t PAGE = 4096;
// Sanitizers make frames several times larger. Untouched pages cost no memory.
#if defined(WITH_ASAN)
constexpr size_t STACK_BYTES = 256 << 10;
#else
constexpr size_t STACK_BYTES = 64 << 10;
#endif
// An odd number of cache lines.
constexpr size_t COLOURS = 64, COLOUR_BYTES = 5 * 64;

// The last frames of a lane never return, so the sanitizer still guards their variables. The kernel's own frames have returned.
#if defined(WITH_ASAN)
constexpr size_t LAST_FRAMES_BYTES = 16 << 10;
void forget_frames(Fiber& fiber) {
    __asan_unpoison_memory_region(fiber.stack + fiber.stack_bytes - LAST_FRAMES_BYTES, LAST_FRAMES_BYTES);
}
#else
void forget_frames(Fiber&) {}
#endif
} // namespace

Stacks::Stacks(Fiber* fibers, size_t count) : bytes(count * (STACK_BYTES + PAGE)) {
    memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        fprintf(stderr, "lookalike: no address space for %zu lane stacks\n", count);
        abort();
    }
    for (size_t i = 0; i < count; i++) {
        // The page below each stack stays inaccessible: an overflow faults there.
        char* stack = (char*)memory + i * (STACK_BYTES + PAGE) + PAGE;
        if (mprotect(stack, STACK_BYTES, PROT_READ | PROT_WRITE) != 0) abort();
        fibers[i].stack = stack;
        // Lanes in turn use the tops of their stacks: equally far into a page, these would all share a few lines of the cache.
        fibers[i].stack_bytes = STACK_BYTES - i % COLOURS * COLOUR_BYTES;
    }
}

Stacks::~Stacks() { munmap(memory, bytes); }

void start(Fiber& fiber, void (*entry)()) {
    forget_frames(fiber);
    // A called function expects its stack pointer 8 bytes off a multiple of 16. So a return address that is never used lies
    // above `entry` and the six registers.
    uintptr_t* top = (uintptr_t*)(fiber.stack + fiber.stack_bytes - 64);
    *--top = 0;
    *--top = (uintptr_t)entry;
    top -= 6;
    fiber.stack_pointer = top;
}

#if defined(WITH_ASAN)
void switch_fiber(Fiber& from, Fiber& to, bool ends) {
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(ends ? nullptr : &fake, to.stack, to.stack_bytes);
    lookalike_switch_stacks(&from.stack_pointer, to.stack_pointer);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}
void arrived() { __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr); }
void abandon(Fiber& fiber) { __asan_unpoison_memory_region(fiber.stack, fiber.stack_bytes); }
#else
void arrived() {}
void abandon(Fiber&) {}
#endif

} // namespace lookalike
