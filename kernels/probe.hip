// probe: ceilings of a device: how fast it reads, how fast it copies, what an empty launch costs
//
// Shapes     probe_read: in: u32[count][4]; out: u32[grid x], the xor of all words that a block read, so that the compiler
//            can leave out no load
//            probe_copy: in, out: u32[count][4]. probe_launch: count: u32, which rises by 1 a launch
// Variants   probe_read reads in the order of a matrix-vector product, four 16-byte words in flight a lane; probe_copy
//            copies; probe_launch only counts: what a launch costs, and whether it ran
// Launch     probe_read, probe_copy: grid = any width, block = 256; probe_launch: any grid, block = 64
// Alignment  16 bytes for in and for out of probe_copy; 4 bytes for the others
// Sums in    u32 xor and count: exact in any order
// Tolerance  0: equal values
// Reference  the values sent and their xor, in tests/kernels/device.rs
// Moves      probe_read: 16 * count bytes in; probe_copy: as many in and out; both memory-bound. probe_launch: 8 bytes;
//            bound by latency
#include "prelude/prelude.h"

KERNEL(256, probe_read, const u32* in, u32* out, u64 count) {
    wait_for_predecessor();
    u64 step = (u64)grid_x() * 256;
    u64 at = (u64)block_x() * 256 + thread_id();
    u32 seen = 0;
    for (; at + 3 * step < count; at += 4 * step) {
        u32x4 a = load16_once(in + 4 * at), b = load16_once(in + 4 * (at + step));
        u32x4 c = load16_once(in + 4 * (at + 2 * step)), d = load16_once(in + 4 * (at + 3 * step));
        seen ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; at < count; at += step) {
        u32x4 a = load16_once(in + 4 * at);
        seen ^= a.x ^ a.y ^ a.z ^ a.w;
    }
    UNROLL for (u32 mask = 1; mask < WAVE; mask *= 2) seen ^= shfl_xor(seen, mask);
    LDS(partial, u32[256 / WAVE]);
    if (lane() == 0) partial[wave()] = seen;
    barrier_lds();
    if (thread_id() == 0) {
        u32 all = 0;
        for (u32 i = 0; i < 256 / WAVE; i++) all ^= partial[i];
        out[block_x()] = all;
    }
}

KERNEL(256, probe_copy, const u32* in, u32* out, u64 count) {
    wait_for_predecessor();
    u64 step = (u64)grid_x() * 256;
    for (u64 at = (u64)block_x() * 256 + thread_id(); at < count; at += step) store16(out + 4 * at, load16(in + 4 * at));
}

KERNEL(64, probe_launch, u32* count) {
    wait_for_predecessor();
    if (block_x() == 0 && thread_id() == 0) *count += 1;
}
