// Weights of tokens in fixed point, and the place of a number in their running sum.
//
// Sums of whole numbers do not depend on their order, so any number of lanes may add to them.
#pragma once
#include "../common/reduce.h"
#include "report.h"

namespace sampling {

constexpr u32 THREADS = 1024, BIN_BITS = 12, BINS = 1 << BIN_BITS, BINS_EACH = BINS / THREADS;

// e^((logit - best) / temperature) * 2^SHARE_BITS, rounded down; `scale` = log2(e) / temperature, best >= logit. The exponent is
// computed in f64, so that only the last place of a 24-bit mantissa is lost for any logits.
DEV u64 share(f32 logit, f32 best, double scale) {
    double exponent = ((double)logit - (double)best) * scale;
    if (exponent < -(double)(SHARE_BITS + 1)) return 0;
    i32 whole = (i32)exponent;
    if ((double)whole > exponent) whole--;
    u32 power = as_u32(exp2_f32((f32)(exponent - (double)whole)));
    // The power lies in 1..=2; its mantissa counts 2^-23.
    i32 shift = (i32)SHARE_BITS - 23 + whole + ((i32)(power >> 23) - 127);
    u64 mantissa = (power & 0x7fffffu) | 0x800000u;
    return shift >= 0 ? mantissa << shift : mantissa >> -shift;
}

// The place of a number in a running sum: the thread in whose part it falls, and the sum of the parts before that.
struct Found {
    u32 thread;
    u32 before_low, before_high;
};

struct Room {
    u32 low[BINS], high[BINS];
    u64 teams[TEAMS_MAX];
    u64 sums[TEAMS_MAX];
    Found found;
};

// Sum over the block.
DEV u64 total(u64 mine, Room& room) {
    barrier_lds();
    return teams_sum(mine, room.sums);
}

// The running sum adds each thread's `mine` in order of threads. Returns the thread in whose part `target` falls; `target` is
// below the total and becomes its offset within that part. The result is the same in all threads.
DEV u32 locate(u64 mine, u64& target, Room& room) {
    u64 upto = mine;
    for (u32 step = 1; step < TEAM; step *= 2) {
        bool reaches = team_lane() >= step;
        u64 before = shfl(upto, reaches ? lane() - step : lane());
        if (reaches) upto += before;
    }
    barrier_lds();
    if (team_lane() == TEAM - 1) room.teams[team_id()] = upto;
    barrier_lds();
    for (u32 i = 0; i < team_id(); i++) upto += room.teams[i];
    if (target < upto && target >= upto - mine) {
        u64 before = upto - mine;
        room.found = {thread_id(), (u32)before, (u32)(before >> 32)};
    }
    barrier_lds();
    target -= (u64)room.found.before_high << 32 | room.found.before_low;
    return room.found.thread;
}

DEV void clear_bins(Room& room) {
    barrier_lds();
    UNROLL for (u32 i = 0; i < BINS_EACH; i++) {
        room.low[i * THREADS + thread_id()] = 0;
        room.high[i * THREADS + thread_id()] = 0;
    }
    barrier_lds();
}

// Two 32-bit additions. The lane whose addition overflows the low word adds the carry.
DEV void add_to_bin(Room& room, u32 bin, u64 weight) {
    u32 low = (u32)weight, high = (u32)(weight >> 32);
    if (low != 0) {
        u32 before = atomic_add(&room.low[bin], low);
        if (before + low < before) high++;
    }
    if (high != 0) atomic_add(&room.high[bin], high);
}

DEV u64 bin_weight(const Room& room, u32 bin) { return (u64)room.high[bin] << 32 | room.low[bin]; }

// The bin in which `target` falls when bins are summed from the highest down; `target` becomes its offset within the bin.
DEV u32 locate_bin(u64& target, Room& room) {
    barrier_lds();
    u64 mine = 0;
    UNROLL for (u32 i = 0; i < BINS_EACH; i++) mine += bin_weight(room, BINS - 1 - (thread_id() * BINS_EACH + i));
    u32 bin = BINS - 1 - locate(mine, target, room) * BINS_EACH;
    for (u32 i = 0; i + 1 < BINS_EACH; i++) {
        u64 weight = bin_weight(room, bin);
        if (target < weight) break;
        target -= weight;
        bin--;
    }
    return bin;
}

// The code of the token in which `target` falls when tokens are ordered by falling code. `each(f)` calls f(code, weight) for
// every token of the calling thread. Codes have BITS bits; tokens of one code count as one. `target` becomes its offset there.
template <u32 BITS, class Each> DEV u32 descend(Each each, u64& target, Room& room) {
    u32 prefix = 0;
    for (u32 left = BITS; left > 0;) {
        u32 bits = min_u32(left, BIN_BITS), shift = left - bits;
        clear_bins(room);
        each([&](u32 code, u64 weight) {
            if ((u64)code >> left == prefix) add_to_bin(room, code >> shift & ((1u << bits) - 1), weight);
        });
        prefix = prefix << bits | locate_bin(target, room);
        left = shift;
    }
    return prefix;
}

} // namespace sampling
