// Reductions over waves and blocks, and the hand-over to the last block, with one source on top of each target's exchanges.
#pragma once

DEV void wait_for_predecessor() {
    wait_for_predecessor_alone();
    let_successor_start();
}

struct Sum {
    template <class T> DEV static T of(T a, T b) { return a + b; }
};
struct Max {
    DEV static f32 of(f32 a, f32 b) { return max_f32(a, b); }
    template <class T> DEV static T of(T a, T b) { return a > b ? a : b; }
};
struct Min {
    DEV static f32 of(f32 a, f32 b) { return min_f32(a, b); }
    template <class T> DEV static T of(T a, T b) { return a < b ? a : b; }
};

// Each lane ends with the same bits: at every step both partners combine the same two values.
template <class OP, u32 WIDTH, u32 MASK = 1, class T> DEV T wave_reduce(T v) {
    static_assert((WIDTH & (WIDTH - 1)) == 0 && WIDTH <= WAVE, "groups are powers of two within a wave");
    if constexpr (MASK < WIDTH) return wave_reduce<OP, WIDTH, MASK * 2>(OP::of(v, reduce_partner<MASK>(v)));
    else return v;
}
template <u32 WIDTH = WAVE, class T> DEV T wave_sum(T v) { return wave_reduce<Sum, WIDTH>(v); }
template <u32 WIDTH = WAVE, class T> DEV T wave_max(T v) { return wave_reduce<Max, WIDTH>(v); }
template <u32 WIDTH = WAVE, class T> DEV T wave_min(T v) { return wave_reduce<Min, WIDTH>(v); }

DEV bool any(bool p) { return ballot(p) != 0; }
DEV bool all(bool p) { return ballot(!p) == 0; }

// The first barrier keeps a second reduction from overwriting values that slow waves still read for the first.
template <class OP, u32 THREADS, class T> DEV T block_reduce(T v) {
    static_assert(THREADS % WAVE == 0, "whole waves");
    constexpr u32 WAVES = THREADS / WAVE;
    LDS(partial, T[WAVES]);
    v = wave_reduce<OP, WAVE>(v);
    barrier_lds();
    if (lane() == 0) partial[wave()] = v;
    barrier_lds();
    v = partial[0];
    UNROLL for (u32 i = 1; i < WAVES; i++) v = OP::of(v, (T)partial[i]);
    return v;
}
template <u32 THREADS, class T> DEV T block_sum(T v) { return block_reduce<Sum, THREADS>(v); }
template <u32 THREADS, class T> DEV T block_max(T v) { return block_reduce<Max, THREADS>(v); }

DEV bool last_block(u32* counter, u32 total) {
    LDS(arrived, u32[1]);
    if (!ATOMIC_ORDERS_BLOCK) fence_device();
    barrier();
    if (thread_id() == 0) {
        u32 before = atomic_add_acq_rel(counter, 1);
        // The last block resets the counter to 0 for the next launch, which begins after this one's writes.
        if (before + 1 == total) *counter = 0;
        arrived[0] = before;
    }
    barrier();
    bool last = arrived[0] + 1 == total;
    if (last && !ATOMIC_ORDERS_BLOCK) fence_device();
    return last;
}
