// The language of kernels: one set of names for AMD GPUs (amd.h), NVIDIA GPUs (nvidia.h) and the CPU (host.h).
//
// A kernel file includes this file and no vendor's header. These rules keep one source right on all targets:
// - all lanes of a wave call a collective (shuffle, reduction, ballot, uniform, mma); all threads of a block that have not
//   returned call a barrier. The CPU body reports a violation at once.
// - WAVE, never a literal 32 or 64. Explicit fma_f32 where one rounding is meant: the compilers contract nothing.
// - no sin, cos, erf, pow, no device function that is not inlined (DEV), no recursion, no array indexed by a run-time number
//   (it would live in memory: fully unroll).
//
// Kernels
//   KERNEL(256, add_f32, const f32* a, f32* b, u32 n) { ... }     at most 256 threads a block; entry point `add_f32`
//   KERNEL_TWICE(256, name, ...)                                  the same; NVIDIA's compiler keeps registers few enough for two
//                                                                 blocks on a unit at once
//   KERNEL_TIMES(256, n, name, ...)                               the same for n blocks
//   KERNEL_CLUSTER(256, name, ...)                                blocks 2 i and 2 i + 1 of the grid's x are a cluster (HAS_BULK_COPY)
//   DEV f32 twice(f32 x) { ... }                                  device function or method, always inlined
//   UNROLL for (u32 i = 0; i < 4; i++)                            fully unrolled
//   ROLLED for (...)                                              never unrolled: for long bodies
//   LDS(tile, f32[64][65]);                                       block-shared array (uninitialised), 16-byte aligned
//   CONSTANT u16 BOOK[256] = {...};                               a table in memory, which a run-time number may index
//   LDS_DYNAMIC(f16, buffer);                                     pointer to the launch's dynamic LDS, 16-byte aligned
// Types
//   u8 i8 u16 i16 u32 i32 u64 i64 f16 f32; bf16 is a struct of its bits. u32x2 u32x4 i32x4 f32x2 f32x4: .x .y .z .w and [i]
// Position
//   thread_id() block_threads() block_x() block_y() block_z() grid_x() grid_y() grid_z() (blocks in the grid)
//   WAVE lane() (0..WAVE) wave() (of this thread in its block)
// Waiting
//   barrier_lds()    block barrier that orders LDS only       barrier()       block barrier, LDS and global memory
//   wave_sync()      orders LDS among the lanes of a wave     fence_device()  orders this thread's global memory for all blocks
//   let_successor_start()  the next launch may start: this block has little left to do
//   bool last_block(u32* counter, u32 total)   true in the last of `total` blocks to arrive, which then sees all that the
//                                              others wrote. The counter starts at 0 and is 0 again afterwards. The whole
//                                              block calls.
//   wait_for_predecessor()  in every kernel, before it writes anything or reads what an earlier launch wrote: launches may
//                           overlap. At the start, or after weight loads. The next launch may then start as well.
//   wait_for_predecessor_alone()  the same, but the next launch starts only after all blocks have ended or called
//                           let_successor_start(): for kernels that fill the device, so that blocks of the next launch
//                           are not spread unevenly among theirs
//   u32 load_written_before(p)  before the wait, too: what a launch before the last one wrote, not what a unit kept of an earlier step
//   LAUNCHES_OVERLAP        whether they do on this kind of device: then weights that come before the wait cost no time
// Across a wave (T: f32 i32 u32 u64)
//   shfl(v, lane) shfl_xor(v, mask) shfl_down(v, n) (lanes past the end get their own v)   u64 ballot(p)  any(p)  all(p)
//   uniform(v)       v, where all lanes hold the same (u32, i32, u64 or a pointer): kept in a scalar register
//   wave_sum<WIDTH>(v) wave_max<WIDTH>(v) wave_min<WIDTH>(v)   over groups of WIDTH lanes (default WAVE), in every lane, xor tree
//   block_sum<THREADS>(v) block_max<THREADS>(v)                over the block, in every thread; LDS inside, two barriers
// Loads and stores (the number is bytes, and the alignment)
//   u32x4 load16(p)  load16_once(p) (weights: read once, keep out of caches where that helps)  u32x2 load8(p)  u32 load4(p)
//   store16(p, v)  store8(p, v)    as_f32(u32) as_u32(f32) as_i32(u32)
//   global_address<T>(u64)  for an address that was loaded: a pointer that the compiler knows to be in global memory
// Copies to LDS that take no registers, where HAS_ASYNC_COPY is 1 (else 0 and none of these)
//   copy16_async(lds, p)  end_copies() (ends a group of this thread's)  wait_copies<N>() (until all but its last N arrived)
//   copy16_or_0_async(lds, p, there)  copies zeros where not `there`: p is not read
// Atomics (device scope; u32* in global memory or LDS)
//   atomic_add(p, v) atomic_max(p, v) atomic_min(p, v) atomic_or(p, v) (relaxed, return the old value)  atomic_cas(p, want, v)
//   atomic_add_acq_rel(p, v) (global memory)  load_acquire(p)  store_release_system(p, v) (seen by the host)
// Integers
//   dot4(i32 a, i32 b, i32 c)      c + sum of four i8*i8          dot4_us(u32 a, i32 b, i32 c)   four u8*i8
//   u32x2 table16_small(u32 q, u32x4 t)   looks up 8 of 16 bytes below 128: .x by the low nibbles of q's bytes, .y by the high ones
//   u32x2 table16_rising(u32 q, u32x4 t)  the same for tables of eight negative bytes before eight others
//   min_u32 max_u32 min_i32 max_i32 clamp_i32 popcount(u32) popcount(u64) ctz(u32) ctz(u64) clz(u32)
//   bits(v, from, count)  byte_i8(u32, i)  byte_u8(u32, i)   ceil_div(a, b)   pack_i8x4(a, b, c, d)
// Floats
//   fma_f32 min_f32 max_f32 abs_f32 sqrt_f32 (exact) floor_f32 round_even_f32   a / b is exact
//   exp2_f32 log2_f32 rsqrt_f32 rcp_f32 (hardware: an error of 1-2 in the last place)   exp_f32 log_f32 tanh_f32 sigmoid_f32
//   silu_f32 gelu_f32 (by tanh) activated(a, which) INFINITY_F32 LOG2_E LN_2
//   f16_to_f32 f32_to_f16 f16_bits f16_from_bits   bf16_to_f32 f32_to_bf16 (nearest even)
//   f32x2 unpack_f16x2(u32)  u32 pack_f16x2(lo, hi)  f32x2 unpack_bf16x2(u32)   pairs of f16: u32 fma_f16x2(a, b, c) (one rounding)
//   u32 within_f16x2(v)  an infinity becomes the largest number     u32 computed_again(v)  v; what is made from it is not kept in
//   registers from before
//   u32 bytes_f16x2<LESS>(u32, i)  bytes i and i + 1 as f16, less LESS (0..128): exact
//   e8m0_to_f32(u8) (2^(e-127)) e8m0_half_to_f32(u8) (half of it, MXFP4's scale over doubled codes)
//   ue4m3_half_to_f32(u8) (half of an 8-bit float, NVFP4's scale over doubled codes)
// Matrix unit, where HAS_MATRIX_UNIT is 1 (else 0 and none of these): D = A B + C, 16x16x16, f16 in, f32 sum, one wave
//   Frag::A a = Frag::load_a(p, ld)    element (row, k) = p[row*ld + k], rows 16-byte aligned    Frag::A::SIZE elements a lane:
//   Frag::B b = Frag::load_bt(p, ld)   element (k, col) = p[col*ld + k], rows 16-byte aligned      a.get(l) a.set(l, f16)
//   Frag::B b = Frag::load_b(p, ld)    element (k, col) = p[k*ld + col]                            A::row(l) A::k(l) B::k(l) B::col(l)
//   Frag::load_a_lds, load_bt_lds      the same from LDS                                           C::row(l) C::col(l)
//   Frag::load_a_turned(v, row, k), load_bt_turned   where HAS_ASYNC_COPY: 16 x 16 elements of LDS rows of 32 values; row and k
//                                      are multiples of 16; part p (16 bytes) of a row lies at part p ^ row / 2 % 4
//   Frag::C c = Frag::zero(); c = Frag::mma(a, b, c); c.get(l) c.set(l, f32)      (A and B may hold an element in several lanes)
//   Frag::Folded c = Frag::folded_zero(); c = Frag::mma_folded(a, b, c)   C with column c + 8 added to column c, c < 8. c.sum(l), which all
//                                      lanes call, is a finished element; c.get(l) c.set(l, f32) may be a part of one. Also Frag::fold(C)
//   Strip   16 rows of A, or columns of B, by 16 of the k of each of K_LANES lanes, for operands made in registers. A lane holds
//           HELD rows: row held(i), of it 16 values in a row, as v[i][0] and v[i][1]. Which k they are is the caller's choice,
//           the same for A and B: k_lane() (0..K_LANES) tells the lanes of a row apart. c = Strip::mma(a, b, c) sums over all
// Wide matrix unit, where HAS_WIDE_MATRIX is 1 (else 0 and none of these): A in registers, 16 rows a wave, and N rows of B in LDS
// that the waves share; neighbouring teams of TEAM waves work together, all lanes of a team call
//   Wide        held(h) (0..HELD), k_lane() as of a Strip. A product sums over 16 of k. a[h], a[HELD + h] are two pairs of f16 of
//               row held(h). B lies in tiles (common/tiled.h); address(p) is a place in LDS as add() takes it
//   Wide::Sums<N> clear(); add(a, tile, half, product) starts product 0..4 of a half; row(i) and get(i, h): the sum of row(i) of B
//               with row held(h) of A, i below ROWS
//               set(i, h, v); start(a, tile, half, product): as add(), from 0; add_down(a, tile, product): row r of B lies down
//               the tiles, 64 in one and the next 64 in the tile beside it, and product p takes 16 p to 16 p + 15 of its k;
//               settle() between products and other uses of the sums
//   Wide::past(address, values)  so many values further
//   exp2_or_0_f32(x)  exp2_f32, or 0 below the smallest normal number
//   Wide::publish() in each thread that has copied to LDS, before the barrier. Wide::begin(a) after the operands a[i] were made,
//               Wide::end() after the products that use them, Wide::wait<LEFT>() until all but the last LEFT batches are done
// Copies to LDS that one wave starts for the block, where HAS_BULK_COPY is 1 (else 0 and none of these)
//   CopyBarrier begin(arrivals)  arrive()  expect(bytes)  wait(parity)     copy_bulk_async(lds, p, bytes, barrier)
// Clusters of two blocks that run at the same time and reach each other's LDS, where HAS_BULK_COPY is 1
//   cluster_rank()  barrier_cluster()  barrier.arrive_in(rank)   copy_bulk_both_async(lds, p, bytes, barrier) copies to the same place in
//   both. A block may end when nothing that others start reaches it any more
//   fewer_registers<N>() more_registers<N>()   of each thread from here on; whole teams of TEAM waves call
#pragma once

#define ROLLED _Pragma("unroll 1")

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;
typedef float f32;

#if defined(ROCMFORGE_HOST)
#include "host.h"
#elif defined(__CUDACC__)
#include "nvidia.h"
#else
#include "amd.h"
#endif

#if !defined(KERNEL_TWICE)
#define KERNEL_TWICE KERNEL
#define KERNEL_TIMES(THREADS, TIMES, ...) KERNEL(THREADS, __VA_ARGS__)
#endif
#if !defined(HAS_WIDE_MATRIX)
#define HAS_WIDE_MATRIX 0
#endif
#if !defined(HAS_BULK_COPY)
#define HAS_BULK_COPY 0
#endif

#include "numbers.h"
#include "wave.h"

#if HAS_MATRIX_UNIT
#if defined(ROCMFORGE_HOST)
#include "host_matrix.h"
#elif defined(__CUDACC__)
#include "nvidia_matrix.h"
#else
#include "amd_matrix.h"
#endif
#endif
#if HAS_WIDE_MATRIX
#if defined(ROCMFORGE_HOST)
#include "host_wide.h"
#else
#include "nvidia_wide.h"
#endif
#endif
