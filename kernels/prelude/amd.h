// AMD body of the prelude: clang's builtins for amdgcn, without HIP's headers and device libraries.
#pragma once

#define DEV __attribute__((device, always_inline)) inline
#define KERNEL(THREADS, NAME, ...)                                                                                             \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, THREADS))) void NAME(__VA_ARGS__)
#define UNROLL _Pragma("unroll")
#define GLOBAL __attribute__((address_space(1)))
#define CONSTANT static __attribute__((constant)) const
#define LDS(NAME, ...) __attribute__((shared, aligned(16))) Same<__VA_ARGS__> NAME
#define LDS_DYNAMIC(T, NAME) T* NAME = (T*)amd::dynamic_lds

typedef _Float16 f16;

#include "types.h"

#if defined(__GFX9__)
#define WAVE 64u
#else
#define WAVE 32u
#endif

#if defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__) || defined(__gfx9_4_generic__)
#define AMD_MFMA 1
#endif
#if defined(__GFX11__) || defined(__GFX12__)
#define AMD_WMMA 1
#endif
#if defined(AMD_MFMA) || defined(AMD_WMMA)
#define HAS_MATRIX_UNIT 1
#else
#define HAS_MATRIX_UNIT 0
#endif
#define HAS_ASYNC_COPY 0

namespace amd {
extern __attribute__((shared, aligned(16))) u32x4 dynamic_lds[];

typedef u32 V4 __attribute__((ext_vector_type(4)));
typedef u32 V2 __attribute__((ext_vector_type(2)));
typedef f16 Halves __attribute__((ext_vector_type(2)));
} // namespace amd

DEV u32 thread_id() { return __builtin_amdgcn_workitem_id_x(); }
DEV u32 block_threads() { return __builtin_amdgcn_workgroup_size_x(); }
DEV u32 block_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEV u32 block_y() { return __builtin_amdgcn_workgroup_id_y(); }
DEV u32 block_z() { return __builtin_amdgcn_workgroup_id_z(); }
DEV u32 grid_x() { return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x(); }
DEV u32 grid_y() { return __builtin_amdgcn_grid_size_y() / __builtin_amdgcn_workgroup_size_y(); }
DEV u32 grid_z() { return __builtin_amdgcn_grid_size_z() / __builtin_amdgcn_workgroup_size_z(); }
DEV u32 lane() {
#if defined(__GFX9__)
    return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
#else
    return __builtin_amdgcn_mbcnt_lo(~0u, 0);
#endif
}
// The value is the same in all lanes of a wave; the compiler cannot know that without readfirstlane.
DEV u32 wave() { return __builtin_amdgcn_readfirstlane(thread_id() / WAVE); }

// "local" orders LDS only: the plain workgroup fence would also flush the vector caches on RDNA.
DEV void barrier_lds() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}
DEV void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEV void wave_sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
// Waves order their own stores here (nvidia.h has the other case).
constexpr bool ATOMIC_ORDERS_BLOCK = false;
DEV void fence_device() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "agent"); }
constexpr bool LAUNCHES_OVERLAP = false;
DEV u32 load_written_before(const u32* p) { return *p; }
DEV void wait_for_predecessor_alone() {}
DEV void let_successor_start() {}

namespace amd {
DEV u32 permute(u32 v, u32 from) { return (u32)__builtin_amdgcn_ds_bpermute((i32)(from << 2), (i32)v); }
DEV u64 permute(u64 v, u32 from) {
    return (u64)permute((u32)(v >> 32), from) << 32 | permute((u32)v, from);
}
DEV i32 permute(i32 v, u32 from) { return (i32)permute((u32)v, from); }
DEV f32 permute(f32 v, u32 from) { return __builtin_bit_cast(f32, permute(__builtin_bit_cast(u32, v), from)); }

// Data-parallel primitives: quad_perm is the four 2-bit fields below 0x100, 0x140 mirrors a row of 16, 0x141 half of one.
template <i32 CONTROL> DEV u32 dpp(u32 v) { return (u32)__builtin_amdgcn_mov_dpp((i32)v, CONTROL, 0xf, 0xf, true); }

// Exchange across `MASK`, for reductions only: values are equal within groups below MASK, so any lane of the partner group
// will do, and mirrors serve for 4 and 8.
template <u32 MASK> DEV u32 partner(u32 v) {
    if constexpr (MASK == 1) return dpp<0xb1>(v);
    else if constexpr (MASK == 2) return dpp<0x4e>(v);
    else if constexpr (MASK == 4) return dpp<0x141>(v);
    else if constexpr (MASK == 8) return dpp<0x140>(v);
#if !defined(__GFX9__)
    else if constexpr (MASK == 16) return __builtin_amdgcn_permlanex16(v, v, 0x76543210u, 0xfedcba98u, true, false);
#endif
    else return permute(v, lane() ^ MASK);
}
template <u32 MASK> DEV i32 partner(i32 v) { return (i32)partner<MASK>((u32)v); }
template <u32 MASK> DEV f32 partner(f32 v) { return __builtin_bit_cast(f32, partner<MASK>(__builtin_bit_cast(u32, v))); }
template <u32 MASK> DEV u64 partner(u64 v) {
    return (u64)partner<MASK>((u32)(v >> 32)) << 32 | partner<MASK>((u32)v);
}
} // namespace amd

template <class T> DEV T shfl(T v, u32 from) { return amd::permute(v, from); }
template <class T> DEV T shfl_xor(T v, u32 mask) { return amd::permute(v, lane() ^ mask); }
template <class T> DEV T shfl_down(T v, u32 n) {
    u32 from = lane() + n;
    return amd::permute(v, from < WAVE ? from : lane());
}
template <u32 MASK, class T> DEV T reduce_partner(T v) { return amd::partner<MASK>(v); }

DEV u64 ballot(bool p) {
#if defined(__GFX9__)
    return __builtin_amdgcn_ballot_w64(p);
#else
    return __builtin_amdgcn_ballot_w32(p);
#endif
}

DEV u32 uniform(u32 v) { return __builtin_amdgcn_readfirstlane(v); }
DEV i32 uniform(i32 v) { return (i32)__builtin_amdgcn_readfirstlane((u32)v); }
DEV u64 uniform(u64 v) { return (u64)uniform((u32)(v >> 32)) << 32 | uniform((u32)v); }
template <class T> DEV T* uniform(T* p) { return (T*)uniform((u64)p); }

DEV u32x4 load16(const void* p) { return __builtin_bit_cast(u32x4, *(const amd::V4*)p); }
// Non-temporal weight loads cost 13 % on RDNA3, so loads are plain everywhere.
DEV u32x4 load16_once(const void* p) { return load16(p); }
DEV u32x2 load8(const void* p) { return __builtin_bit_cast(u32x2, *(const amd::V2*)p); }
DEV u32 load4(const void* p) { return *(const u32*)p; }
DEV void store16(void* p, u32x4 v) { *(amd::V4*)p = __builtin_bit_cast(amd::V4, v); }
DEV void store8(void* p, u32x2 v) { *(amd::V2*)p = __builtin_bit_cast(amd::V2, v); }

#define AMD_ATOMIC(NAME, OPERATION)                                                                                            \
    DEV u32 NAME(u32* p, u32 v) { return OPERATION(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
AMD_ATOMIC(atomic_add, __hip_atomic_fetch_add)
AMD_ATOMIC(atomic_max, __hip_atomic_fetch_max)
AMD_ATOMIC(atomic_min, __hip_atomic_fetch_min)
AMD_ATOMIC(atomic_or, __hip_atomic_fetch_or)
DEV u32 atomic_cas(u32* p, u32 want, u32 v) {
    __hip_atomic_compare_exchange_strong(p, &want, v, __ATOMIC_RELAXED, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    return want;
}
DEV u32 atomic_add_acq_rel(u32* p, u32 v) {
    return __hip_atomic_fetch_add(p, v, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}
DEV u32 load_acquire(const u32* p) { return __hip_atomic_load(p, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT); }
DEV void store_release_system(u32* p, u32 v) { __hip_atomic_store(p, v, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM); }

DEV i32 dot4(i32 a, i32 b, i32 c) {
#if defined(__GFX11__) || defined(__GFX12__)
    return __builtin_amdgcn_sudot4(true, a, true, b, c, false);
#elif defined(__gfx906__) || defined(AMD_MFMA) || defined(__gfx1030__) || defined(__gfx10_3_generic__)
    return __builtin_amdgcn_sdot4(a, b, c, false);
#else
    UNROLL for (u32 i = 0; i < 4; i++) c += (i32)(i8)(a >> (8 * i)) * (i32)(i8)(b >> (8 * i));
    return c;
#endif
}
DEV i32 dot4_us(u32 a, i32 b, i32 c) {
#if defined(__GFX11__) || defined(__GFX12__)
    return __builtin_amdgcn_sudot4(false, (i32)a, true, b, c, false);
#else
    // These targets have no dot product of mixed signs: u = (u - 128) + 128.
    return dot4((i32)(a ^ 0x80808080u), b, c) + 128 * dot4(0x01010101, b, 0);
#endif
}

DEV u32x2 table16(u32 q, u32x4 t) {
    // v_perm takes a byte's index from three bits of each selector byte. A third one chooses the half of the table: byte i of `low`
    // has selector i, of `high` i + 4, which is bit 3 of the index moved by one.
    auto look_up = [&](u32 index, u32 half) {
        const u32 select = index & 0x07070707u;
        const u32 low = __builtin_amdgcn_perm(t.y, t.x, select), high = __builtin_amdgcn_perm(t.w, t.z, select);
        return __builtin_amdgcn_perm(high, low, (half & 0x04040404u) | 0x03020100u);
    };
    return {look_up(q, q >> 1), look_up(q >> 4, q >> 5)};
}
DEV u32x2 table16_small(u32 q, u32x4 t) { return table16(q, t); }
DEV u32x2 table16_rising(u32 q, u32x4 t) { return table16(q, t); }
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
// The instructions flush denormal results of exp2 and accept no denormal input of log2. No kernel needs values below 2^-126.
DEV f32 exp2_f32(f32 a) { return __builtin_amdgcn_exp2f(a); }
DEV f32 log2_f32(f32 a) { return __builtin_amdgcn_logf(a); }
DEV f32 rsqrt_f32(f32 a) { return __builtin_amdgcn_rsqf(a); }
DEV f32 rcp_f32(f32 a) { return __builtin_amdgcn_rcpf(a); }

DEV u32 as_u32(f32 v) { return __builtin_bit_cast(u32, v); }
DEV f32 as_f32(u32 v) { return __builtin_bit_cast(f32, v); }
DEV f32 f16_to_f32(f16 v) { return (f32)v; }
DEV f16 f32_to_f16(f32 v) { return (f16)v; }
DEV u16 f16_bits(f16 v) { return __builtin_bit_cast(u16, v); }
DEV f16 f16_from_bits(u16 v) { return __builtin_bit_cast(f16, v); }

// Bytes as the last digits of 2^10, less that again: exact.
template <i32 LESS> DEV u32 bytes_f16x2(u32 v, u32 i) {
    const u32 both = __builtin_amdgcn_perm(0x64646464u, v, 0x04010400u + 0x10001u * i);
    const amd::Halves less = (f16)(1024 + LESS);
    return __builtin_bit_cast(u32, __builtin_bit_cast(amd::Halves, both) - less);
}
DEV u32 fma_f16x2(u32 a, u32 b, u32 c) {
    using amd::Halves;
    return __builtin_bit_cast(u32, __builtin_elementwise_fma(__builtin_bit_cast(Halves, a), __builtin_bit_cast(Halves, b),
                                                             __builtin_bit_cast(Halves, c)));
}
