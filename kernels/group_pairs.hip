// group_pairs: members = the pairs of a row and an expert, expert by expert, cut into tiles of at most `size` pairs
//
// Shapes     experts: u32[pairs], of pair p its expert's number, or NO_EXPERT for none; members: u32[pairs], pair numbers, those
//            of expert 0 first; tiles: u32[tiles_max][4] of expert, first of members, pairs (0: no tile), 0
// Requires   experts below `count` or NO_EXPERT; count <= 512; tiles_max >= tiles, of which are at most
//            min(pairs, pairs / size + count)
// Launch     grid = 1, block = 1024
// Alignment  4 bytes
// Sums in    no floats. The tiles are in order of their experts; the order of an expert's pairs is any
// Tolerance  0: each pair once, in a tile of its expert
// Reference  a sort in tests/kernels/experts.rs
// Moves      8 bytes in and 4 out per pair, 16 out per tile; latency-bound
#include "prelude/prelude.h"
#include "common/experts.h"

namespace grouping {

constexpr u32 EXPERTS = 512, THREADS = 1024;

// Sums over the entries before each of EXPERTS entries, one a thread. All threads call.
DEV u32 sum_before(u32 (&room)[2][EXPERTS], u32 mine) {
    const u32 i = thread_id();
    barrier_lds();
    if (i < EXPERTS) room[0][i] = mine;
    u32 from = 0;
    ROLLED for (u32 step = 1; step < EXPERTS; step *= 2) {
        barrier_lds();
        if (i < EXPERTS) room[1 - from][i] = room[from][i] + (i >= step ? room[from][i - step] : 0);
        from = 1 - from;
    }
    barrier_lds();
    return i < EXPERTS ? room[from][i] - mine : 0;
}

} // namespace grouping

KERNEL(1024, group_pairs, const u32* experts, u32* members, u32* tiles, u32 pairs, u32 count, u32 size, u32 tiles_max) {
    using namespace grouping;
    LDS(counts, u32[EXPERTS]);
    LDS(room, u32[2][EXPERTS]);
    LDS(used, u32[1]);
    wait_for_predecessor();
    const u32 i = thread_id();
    if (i < EXPERTS) counts[i] = 0;
    barrier_lds();
    for (u32 p = i; p < pairs; p += THREADS) {
        const u32 expert = experts[p];
        if (expert < count) atomic_add(&counts[expert], 1);
    }
    barrier_lds();
    const u32 mine = i < EXPERTS ? counts[i] : 0, own = ceil_div(mine, size);
    const u32 first = sum_before(room, mine), tile = sum_before(room, own);
    if (i < EXPERTS) counts[i] = first;
    if (i == EXPERTS - 1) used[0] = tile + own;
    for (u32 t = 0; t < own; t++) {
        u32* to = tiles + 4 * (tile + t);
        to[0] = i;
        to[1] = first + t * size;
        to[2] = min_u32(size, mine - t * size);
        to[3] = 0;
    }
    barrier_lds();
    for (u32 t = used[0] + i; t < tiles_max; t += THREADS) tiles[4 * t] = tiles[4 * t + 1] = tiles[4 * t + 2] = tiles[4 * t + 3] = 0;
    for (u32 p = i; p < pairs; p += THREADS) {
        const u32 expert = experts[p];
        if (expert < count) members[atomic_add(&counts[expert], 1)] = p;
    }
}
