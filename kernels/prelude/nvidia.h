// NVIDIA body of the prelude: for nvcc, sm_80 and newer.
#pragma once

#include <cuda_fp16.h>

// CUDA still declares functions of these names, for hardware that it no longer supports.
#define ballot wave_ballot
#define any wave_any
#define all wave_all

#define DEV __device__ __forceinline__
#define KERNEL(THREADS, NAME, ...) extern "C" __global__ void __launch_bounds__(THREADS) NAME(__VA_ARGS__)
#define KERNEL_TWICE(THREADS, NAME, ...) KERNEL_TIMES(THREADS, 2, NAME, __VA_ARGS__)
#define KERNEL_TIMES(THREADS, TIMES, NAME, ...)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, TIMES) NAME(__VA_ARGS__)
#define KERNEL_CLUSTER(THREADS, NAME, ...)                                                                                     \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS) NAME(__VA_ARGS__)
#define UNROLL _Pragma("unroll")
#define CONSTANT static __device__ const
#define LDS(NAME, ...) __shared__ __align__(16) Same<__VA_ARGS__> NAME
#define LDS_DYNAMIC(T, NAME) T* NAME = (T*)nvidia::dynamic_lds

typedef __half f16;

#include "types.h"

#define WAVE 32u
#define HAS_MATRIX_UNIT 1
#define HAS_ASYNC_COPY 1
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(HAS_WIDE_MATRIX)
#define HAS_WIDE_MATRIX 1
#endif
#define HAS_BULK_COPY 1
#define HAS_NUMBER_TRICKS 1

namespace nvidia {
extern __shared__ __align__(16) unsigned char dynamic_lds[];
constexpr u32 ALL = 0xffffffffu;
} // namespace nvidia

DEV u32 thread_id() { return threadIdx.x; }
DEV u32 block_threads() { return blockDim.x; }
DEV u32 block_x() { return blockIdx.x; }
DEV u32 block_y() { return blockIdx.y; }
DEV u32 block_z() { return blockIdx.z; }
DEV u32 grid_x() { return gridDim.x; }
DEV u32 grid_y() { return gridDim.y; }
DEV u32 grid_z() { return gridDim.z; }
DEV u32 lane() { return threadIdx.x % WAVE; }
DEV u32 wave() { return threadIdx.x / WAVE; }

DEV void barrier_lds() { __syncthreads(); }
DEV void barrier() { __syncthreads(); }
DEV void wave_sync() { __syncwarp(); }
DEV void fence_device() { __threadfence(); }
// From memory: a unit may keep what an earlier step wrote until the wait.
DEV u32 load_written_before(const u32* p) { return *(const volatile u32*)p; }
// Both functions do nothing where the launch may not overlap its predecessor or successor.
constexpr bool LAUNCHES_OVERLAP = true;
DEV void wait_for_predecessor_alone() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEV void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class T> DEV T shfl(T v, u32 from) { return __shfl_sync(nvidia::ALL, v, (int)from); }
template <class T> DEV T shfl_xor(T v, u32 mask) { return __shfl_xor_sync(nvidia::ALL, v, (int)mask); }
template <class T> DEV T shfl_down(T v, u32 n) { return __shfl_down_sync(nvidia::ALL, v, n); }
template <u32 MASK, class T> DEV T reduce_partner(T v) { return __shfl_xor_sync(nvidia::ALL, v, (int)MASK); }
DEV u64 ballot(bool p) { return __ballot_sync(nvidia::ALL, p); }
template <class T> DEV T uniform(T v) { return v; }
DEV u32 computed_again(u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}

namespace nvidia {
DEV u32x4 from(uint4 v) { return {v.x, v.y, v.z, v.w}; }
DEV __half2 halves(u32 v) { return *(const __half2*)&v; }
DEV u32 bits(__half2 v) { return *(const u32*)&v; }
} // namespace nvidia

DEV u32x4 load16(const void* p) { return nvidia::from(*(const uint4*)p); }
DEV u32x4 load16_once(const void* p) { return nvidia::from(__ldcs((const uint4*)p)); }
DEV u32x2 load8(const void* p) {
    uint2 v = *(const uint2*)p;
    return {v.x, v.y};
}
DEV u32 load4(const void* p) { return *(const u32*)p; }
DEV void store16(void* p, u32x4 v) { *(uint4*)p = make_uint4(v.x, v.y, v.z, v.w); }
DEV void store8(void* p, u32x2 v) { *(uint2*)p = make_uint2(v.x, v.y); }

DEV void copy16_async(void* lds, const void* p) {
    u32 at = (u32)__cvta_generic_to_shared(lds);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(__cvta_generic_to_global(p)) : "memory");
}
DEV void copy16_or_0_async(void* lds, const void* p, bool there) {
    u32 at = (u32)__cvta_generic_to_shared(lds), bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(__cvta_generic_to_global(p)), "r"(bytes) : "memory");
}
DEV void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <u32 GROUPS> DEV void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory"); }

DEV u32 atomic_add(u32* p, u32 v) { return atomicAdd(p, v); }
DEV u32 atomic_max(u32* p, u32 v) { return atomicMax(p, v); }
DEV u32 atomic_min(u32* p, u32 v) { return atomicMin(p, v); }
DEV u32 atomic_or(u32* p, u32 v) { return atomicOr(p, v); }
DEV u32 atomic_cas(u32* p, u32 want, u32 v) { return atomicCAS(p, want, v); }
// In PTX's memory model a barrier of the block before and after makes one thread's release and acquire count for all threads. A
// fence of each thread instead takes about a microsecond.
constexpr bool ATOMIC_ORDERS_BLOCK = true;
DEV u32 atomic_add_acq_rel(u32* p, u32 v) {
    u32 old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(__cvta_generic_to_global(p)), "r"(v) : "memory");
    return old;
}
DEV u32 load_acquire(const u32* p) {
    u32 v = *(const volatile u32*)p;
    __threadfence();
    return v;
}
DEV void store_release_system(u32* p, u32 v) {
    __threadfence_system();
    *(volatile u32*)p = v;
}

DEV i32 dot4(i32 a, i32 b, i32 c) { return __dp4a(a, b, c); }
DEV i32 dot4_us(u32 a, i32 b, i32 c) {
    i32 d;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// PRMT with all four bits of a selector; __byte_perm clears the fourth.
DEV u32 permute_bytes(u32 a, u32 b, u32 select) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(select));
    return d;
}
DEV u32x2 table16_small(u32 q, u32x4 t) {
    // PRMT takes four selectors of a nibble each from its low half: three bits choose a byte, the fourth replicates its sign. Of a
    // byte below 128 that is 0, so each half of the table gives 0 for the nibbles of the other.
    const u32 other = q ^ 0x88888888u;
    const u32 first = permute_bytes(t.x, t.y, q) | permute_bytes(t.z, t.w, other);
    const u32 second = permute_bytes(t.x, t.y, q >> 16) | permute_bytes(t.z, t.w, other >> 16);
    return {__byte_perm(first, second, 0x6420u), __byte_perm(first, second, 0x7531u)};
}
DEV u32x2 table16_rising(u32 q, u32x4 t) {
    const u32x2 sizes = table16_small(q, {t.x ^ 0x80808080u, t.y ^ 0x80808080u, t.z, t.w});
    return {sizes.x ^ (~(q << 4) & 0x80808080u), sizes.y ^ (~q & 0x80808080u)};
}
DEV u32 popcount(u32 v) { return (u32)__popc(v); }
DEV u32 popcount(u64 v) { return (u32)__popcll(v); }
DEV u32 ctz(u32 v) { return (u32)__ffs((int)v) - 1; }
DEV u32 ctz(u64 v) { return (u32)__ffsll((long long)v) - 1; }
DEV u32 clz(u32 v) { return (u32)__clz((int)v); }

DEV f32 fma_f32(f32 a, f32 b, f32 c) { return __fmaf_rn(a, b, c); }
DEV f32 min_f32(f32 a, f32 b) { return fminf(a, b); }
DEV f32 max_f32(f32 a, f32 b) { return fmaxf(a, b); }
DEV f32 abs_f32(f32 a) { return fabsf(a); }
DEV f32 sqrt_f32(f32 a) { return __fsqrt_rn(a); }
DEV f32 floor_f32(f32 a) { return floorf(a); }
DEV f32 round_even_f32(f32 a) { return rintf(a); }
DEV f32 exp2_f32(f32 a) { return exp2f(a); }
DEV f32 log2_f32(f32 a) { return log2f(a); }
DEV f32 rsqrt_f32(f32 a) { return rsqrtf(a); }
DEV f32 rcp_f32(f32 a) { return __frcp_rn(a); }

DEV u32 as_u32(f32 v) { return __float_as_uint(v); }
DEV f32 as_f32(u32 v) { return __uint_as_float(v); }
DEV f32 f16_to_f32(f16 v) { return __half2float(v); }
DEV f16 f32_to_f16(f32 v) { return __float2half_rn(v); }
DEV u16 f16_bits(f16 v) { return __half_as_ushort(v); }
DEV f16 f16_from_bits(u16 v) { return __ushort_as_half(v); }

// One instruction for both, where two conversions and a shift are three.
DEV u32 pack_f16x2(f32 low, f32 high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
// Bytes as the last digits of 2^10, less that again: exact.
template <i32 LESS> DEV u32 bytes_f16x2(u32 v, u32 i) {
    const u32 both = __byte_perm(v, 0x64646464u, 0x4140u + 0x101u * i);
    const __half2 less = __half2half2(__ushort_as_half((u16)(0x6400 + LESS)));
    return nvidia::bits(__hsub2(nvidia::halves(both), less));
}
DEV u32 fma_f16x2(u32 a, u32 b, u32 c) {
    return nvidia::bits(__hfma2(nvidia::halves(a), nvidia::halves(b), nvidia::halves(c)));
}
DEV u32 within_f16x2(u32 v) {
    const __half2 most = __half2half2(__ushort_as_half(0x7bff));
    return nvidia::bits(__hmax2_nan(__hmin2_nan(nvidia::halves(v), most), __hneg2(most)));
}
