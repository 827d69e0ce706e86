// CPU body of the prelude, for tests: a lane is a fiber, and lanes really wait at collectives and barriers.
//
// tests/lookalike/cpu runs the fibers; this file declares the functions that it needs. Collectives carry the place of their
// call, so that lanes that wait at different places are reported and not matched.
#pragma once

#include <math.h>
#include <stddef.h>
#include <string.h>

#include <type_traits>
#include <utility>

#define DEV __attribute__((always_inline)) inline
#define KERNEL(THREADS, NAME, ...)                                                                                             \
    extern "C" void NAME(__VA_ARGS__);                                                                                         \
    static host::Kernel registered_##NAME(#NAME, THREADS, NAME);                                                               \
    extern "C" void NAME(__VA_ARGS__)
// Not inlined: kernels call it in many places, and the call is little beside its work.
#define CALLED __attribute__((noinline)) inline
#define UNROLL _Pragma("unroll")
#define CONSTANT static const
// One address for all threads of a block: the first thread to arrive allocates. `place` differs between template instances.
#define LDS(NAME, ...)                                                                                                         \
    static const char NAME##_place = 0;                                                                                        \
    auto& NAME = *(Same<__VA_ARGS__>*)host::lds(&NAME##_place, sizeof(Same<__VA_ARGS__>))
#define LDS_DYNAMIC(T, NAME) T* NAME = (T*)host::lds_dynamic()

typedef _Float16 f16;

#include "types.h"

#if !defined(WAVE)
#define WAVE 32u
#endif
#if !defined(HAS_MATRIX_UNIT)
#define HAS_MATRIX_UNIT 1
#endif
// At one wave size only, so that kernels are tested with and without it.
#define HAS_ASYNC_COPY (WAVE == 32 && HAS_MATRIX_UNIT)
#define HAS_WIDE_MATRIX HAS_ASYNC_COPY

// The place of a collective: the caller's file and line, as default arguments.
#define HOST_HERE const char *file = __builtin_FILE(), i32 line = __builtin_LINE()

namespace host {

constexpr u32 SLOT_BYTES = 64;

// A thread of the running block, as kernels see it.
struct Lane {
    u32 thread, lane, wave;
    // Exchanges alternate between two slots, so that one wait separates writers and readers.
    u32 turn;
    Lane* first_of_wave;
    // Copies in flight. A copy arrives when a lane waits for it and no sooner. `groups`: number of groups that ended.
    u32 copies, groups;
    alignas(64) unsigned char slot[2][SLOT_BYTES];
    static constexpr u32 COPIES_MAX = 32;
    struct {
        void* to;
        const void* from;
        u32 group;
    } copy[COPIES_MAX];
};
static_assert(sizeof(Lane) / 64 % 2 == 1, "lanes use the same parts of theirs in turn, which must not share cache lines");

struct Block {
    u32 at[3], grid[3];
    u32 threads;
};

// Without `constinit`, every use would first ask whether they are initialised.
extern constinit thread_local Lane* self __attribute__((tls_model("initial-exec")));
extern constinit thread_local const Block* block __attribute__((tls_model("initial-exec")));

// Waits for all lanes of the wave, or for all threads of the block that have not returned.
__attribute__((noinline)) void wait_wave(const char* what, const char* file, i32 line);
__attribute__((noinline)) void wait_block(const char* file, i32 line);
__attribute__((noinline)) void* lds(const void* place, size_t bytes);
void* lds_dynamic();
// Ends the launch with an error that the log explains. Does not return; it has no noreturn attribute because sanitizers would
// then unwind the stack.
void fault(const char* text, const char* file, i32 line);

// An entry point, for a launch to check and call. All entry points form a list.
struct Kernel {
    static constexpr u32 ARGUMENTS_MAX = 64;

    const char* name;
    u32 threads_max;
    u32 arguments;
    u32 size[ARGUMENTS_MAX] = {};
    bool pointer[ARGUMENTS_MAX] = {};
    void (*function)();
    void (*call)(void (*)(), void* const*);
    u64 launches = 0;
    Kernel* next;

    template <class... A> Kernel(const char* name, u32 threads_max, void (*f)(A...))
        : name(name), threads_max(threads_max), arguments(sizeof...(A)), function((void (*)())f),
          call([](void (*f)(), void* const* values) {
              unpack((void (*)(A...))f, values, std::index_sequence_for<A...>{});
          }), next(all) {
        static_assert(sizeof...(A) <= ARGUMENTS_MAX, "as many arguments as a launch packs");
        u32 i = 0;
        ((pointer[i] = std::is_pointer_v<A>, size[i++] = sizeof(A)), ...);
        all = this;
    }
    template <class... A, size_t... I>
    static void unpack(void (*f)(A...), void* const* values, std::index_sequence<I...>) {
        f(*(A*)values[I]...);
    }
    static Kernel* all;
};

template <class T> CALLED T exchange(T v, u32 from, const char* what, const char* file, i32 line) {
    static_assert(sizeof(T) <= SLOT_BYTES, "an exchange fits a slot");
    Lane* me = self;
    u32 turn = me->turn;
    me->turn = turn ^ 1;
    memcpy(me->slot[turn], &v, sizeof v);
    wait_wave(what, file, line);
    memcpy(&v, me->first_of_wave[from % WAVE].slot[turn], sizeof v);
    return v;
}

template <u32 BYTES> DEV void check_aligned(const void* p, const char* file, i32 line) {
    if ((size_t)p % BYTES != 0) fault("an address is not aligned to the size of the access", file, line);
}
} // namespace host

DEV u32 thread_id() { return host::self->thread; }
DEV u32 block_threads() { return host::block->threads; }
DEV u32 block_x() { return host::block->at[0]; }
DEV u32 block_y() { return host::block->at[1]; }
DEV u32 block_z() { return host::block->at[2]; }
DEV u32 grid_x() { return host::block->grid[0]; }
DEV u32 grid_y() { return host::block->grid[1]; }
DEV u32 grid_z() { return host::block->grid[2]; }
DEV u32 lane() { return host::self->lane; }
DEV u32 wave() { return host::self->wave; }

DEV void barrier_lds(HOST_HERE) { host::wait_block(file, line); }
DEV void barrier(HOST_HERE) { host::wait_block(file, line); }
DEV void wave_sync(HOST_HERE) { host::wait_wave("wave_sync", file, line); }
constexpr bool ATOMIC_ORDERS_BLOCK = false;
DEV void fence_device() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
// They do not, but tests take what kernels do where launches overlap.
constexpr bool LAUNCHES_OVERLAP = true;
DEV u32 load_written_before(const u32* p) { return *p; }
DEV void wait_for_predecessor_alone() {}
DEV void let_successor_start() {}

template <class T> DEV T shfl(T v, u32 from, HOST_HERE) { return host::exchange(v, from, "shfl", file, line); }
template <class T> DEV T shfl_xor(T v, u32 mask, HOST_HERE) {
    return host::exchange(v, lane() ^ mask, "shfl_xor", file, line);
}
template <class T> DEV T shfl_down(T v, u32 n, HOST_HERE) {
    u32 from = lane() + n;
    return host::exchange(v, from < WAVE ? from : lane(), "shfl_down", file, line);
}
template <u32 MASK, class T> DEV T reduce_partner(T v, HOST_HERE) {
    return host::exchange(v, lane() ^ MASK, "a wave's reduction", file, line);
}

CALLED u64 ballot(bool p, HOST_HERE) {
    host::Lane* me = host::self;
    u32 turn = me->turn;
    me->turn = turn ^ 1;
    me->slot[turn][0] = p;
    host::wait_wave("ballot", file, line);
    u64 mask = 0;
    for (u32 i = 0; i < WAVE; i++) mask |= (u64)me->first_of_wave[i].slot[turn][0] << i;
    return mask;
}

template <class T> DEV T uniform(T v, HOST_HERE) {
    T first = host::exchange(v, 0, "uniform", file, line);
    if (memcmp(&first, &v, sizeof v) != 0) host::fault("uniform() of a value that differs between lanes", file, line);
    return first;
}

DEV u32x4 load16(const void* p, HOST_HERE) {
    host::check_aligned<16>(p, file, line);
    u32x4 v;
    memcpy(&v, p, 16);
    return v;
}
DEV u32x4 load16_once(const void* p, HOST_HERE) { return load16(p, file, line); }
CALLED void copy16_async(void* lds, const void* p, HOST_HERE) {
    host::check_aligned<16>(lds, file, line);
    host::check_aligned<16>(p, file, line);
    host::Lane* me = host::self;
    if (me->copies == host::Lane::COPIES_MAX) host::fault("too many copies are in flight", file, line);
    me->copy[me->copies++] = {lds, p, me->groups};
}
namespace host {
alignas(16) constexpr unsigned char ZEROS[16] = {};
} // namespace host
DEV void copy16_or_0_async(void* lds, const void* p, bool there, HOST_HERE) {
    copy16_async(lds, there ? p : host::ZEROS, file, line);
}
DEV void end_copies() { host::self->groups++; }
template <u32 GROUPS> CALLED void wait_copies() {
    host::Lane* me = host::self;
    u32 arrived = 0;
    while (arrived < me->copies && me->copy[arrived].group + GROUPS < me->groups) {
        memcpy(me->copy[arrived].to, me->copy[arrived].from, 16);
        arrived++;
    }
    me->copies -= arrived;
    for (u32 i = 0; i < me->copies; i++) me->copy[i] = me->copy[i + arrived];
}
DEV u32x2 load8(const void* p, HOST_HERE) {
    host::check_aligned<8>(p, file, line);
    u32x2 v;
    memcpy(&v, p, 8);
    return v;
}
DEV u32 load4(const void* p, HOST_HERE) {
    host::check_aligned<4>(p, file, line);
    u32 v;
    memcpy(&v, p, 4);
    return v;
}
DEV void store16(void* p, u32x4 v, HOST_HERE) {
    host::check_aligned<16>(p, file, line);
    memcpy(p, &v, 16);
}
DEV void store8(void* p, u32x2 v, HOST_HERE) {
    host::check_aligned<8>(p, file, line);
    memcpy(p, &v, 8);
}

DEV u32 atomic_add(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
DEV u32 atomic_max(u32* p, u32 v) { return __atomic_fetch_max(p, v, __ATOMIC_RELAXED); }
DEV u32 atomic_min(u32* p, u32 v) { return __atomic_fetch_min(p, v, __ATOMIC_RELAXED); }
DEV u32 atomic_or(u32* p, u32 v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }
DEV u32 atomic_cas(u32* p, u32 want, u32 v) {
    __atomic_compare_exchange_n(p, &want, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return want;
}
DEV u32 atomic_add_acq_rel(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
DEV u32 load_acquire(const u32* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEV void store_release_system(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

DEV i32 dot4(i32 a, i32 b, i32 c) {
    UNROLL for (u32 i = 0; i < 4; i++) c += (i32)(i8)(a >> (8 * i)) * (i32)(i8)(b >> (8 * i));
    return c;
}
DEV i32 dot4_us(u32 a, i32 b, i32 c) {
    UNROLL for (u32 i = 0; i < 4; i++) c += (i32)(u8)(a >> (8 * i)) * (i32)(i8)(b >> (8 * i));
    return c;
}
CALLED u32x2 table16(u32 q, u32x4 t) {
    u8 table[16];
    memcpy(table, &t, 16);
    u32x2 found = {0, 0};
    UNROLL for (u32 i = 0; i < 4; i++) {
        found.x |= (u32)table[q >> (8 * i) & 15] << (8 * i);
        found.y |= (u32)table[q >> (8 * i + 4) & 15] << (8 * i);
    }
    return found;
}
CALLED u32x2 table16_small(u32 q, u32x4 t) { return table16(q, t); }
CALLED u32x2 table16_rising(u32 q, u32x4 t) { return table16(q, t); }
DEV u32 popcount(u32 v) { return (u32)__builtin_popcount(v); }
DEV u32 popcount(u64 v) { return (u32)__builtin_popcountll(v); }
DEV u32 ctz(u32 v) { return (u32)__builtin_ctz(v); }
DEV u32 ctz(u64 v) { return (u32)__builtin_ctzll(v); }
DEV u32 clz(u32 v) { return (u32)__builtin_clz(v); }

DEV f32 fma_f32(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
DEV f32 min_f32(f32 a, f32 b) { return __builtin_fminf(a, b); }
DEV f32 max_f32(f32 a, f32 b) { return __builtin_fmaxf(a, b); }
DEV f32 abs_f32(f32 a) { return __builtin_fabsf(a); }
DEV f32 sqrt_f32(f32 a) { return __builtin_sqrtf(a); }
DEV f32 floor_f32(f32 a) { return __builtin_floorf(a); }
DEV f32 round_even_f32(f32 a) { return __builtin_rintf(a); }
DEV f32 exp2_f32(f32 a) { return exp2f(a); }
DEV f32 log2_f32(f32 a) { return log2f(a); }
DEV f32 rsqrt_f32(f32 a) { return 1.0f / sqrtf(a); }
DEV f32 rcp_f32(f32 a) { return 1.0f / a; }

DEV u32 as_u32(f32 v) { return __builtin_bit_cast(u32, v); }
DEV f32 as_f32(u32 v) { return __builtin_bit_cast(f32, v); }
DEV f32 f16_to_f32(f16 v) { return (f32)v; }
DEV f16 f32_to_f16(f32 v) { return (f16)v; }
DEV u16 f16_bits(f16 v) { return __builtin_bit_cast(u16, v); }
DEV f16 f16_from_bits(u16 v) { return __builtin_bit_cast(f16, v); }

template <i32 LESS> CALLED u32 bytes_f16x2(u32 v, u32 i) {
    const auto one = [&](u32 b) { return (u32)f16_bits((f16)((i32)(v >> 8 * b & 0xff) - LESS)); };
    return one(i) | one(i + 1) << 16;
}
CALLED u32 fma_f16x2(u32 a, u32 b, u32 c) {
    // Products and their sums are exact in f64, or far from a tie of f16.
    const auto one = [&](u32 shift) {
        const auto value = [&](u32 v) { return (double)f16_from_bits((u16)(v >> shift)); };
        return (u32)f16_bits((f16)__builtin_fma(value(a), value(b), value(c))) << shift;
    };
    return one(0) | one(16);
}
