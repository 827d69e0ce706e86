// A row that a block norms for itself: y = x * gain / sqrt(mean(x^2) + eps). So a launch of few blocks needs none for its norm
// before. With hundreds of blocks it is not worth it: in the products of an 8B model it took 5 us on an H200, a launch takes 4.
//
// The bits are those of an RMS norm without bias in norm.hip, with as many threads as `norm_threads` says: partial sums of those
// threads in their order, 32 as a tree, then the trees' sums as a tree.
#pragma once
#include "activation.h"

struct NormIn {
    const f32* gain; // [cols], 16-byte aligned
    f32 eps;
    u32 cols;
};

// Threads that norm.hip gives a row: sixteen values each.
DEV u32 norm_threads(u32 cols) { return cols <= 4096 ? 256 : cols <= 8192 ? 512 : 1024; }

// Calls put(k, y) with values k..k+4 of row `x`, zeros from `cols` on, up to `end` and beyond: all lanes of a wave call together,
// k rises by 4 from lane to lane. The whole block of 256 calls, with a barrier between two calls.
template <class Put> DEV void norm_row(const NormIn& in, const f32* x, u32 end, Put put) {
    LDS(room, f32[32]);
    const u32 i = thread_id(), threads = norm_threads(in.cols);
    ROLLED for (u32 first = 0; first < threads; first += 256) {
        Four v[4];
        UNROLL for (u32 p = 0; p < 4; p++) v[p] = load_four(x, (p * threads + first + i) * 4, in.cols, true);
        f32 sum = 0.0f;
        UNROLL for (u32 p = 0; p < 4; p++) {
            UNROLL for (u32 j = 0; j < 4; j++) sum = fma_f32(v[p].v[j], v[p].v[j], sum);
        }
        sum = wave_sum<32>(sum);
        if (i % 32 == 0) room[(first + i) / 32] = sum;
    }
    // On their way while the sums are joined. The row itself is near by now.
    Four gain[4];
    auto fetch = [&](u32 start) {
        UNROLL for (u32 p = 0; p < 4; p++) gain[p] = load_four(in.gain, start + (p * 256 + i) * 4, in.cols, true);
    };
    fetch(0);
    barrier_lds();
    const f32 sum = wave_sum<32>(i % 32 < threads / 32 ? room[i % 32] : 0.0f);
    const f32 factor = 1.0f / sqrt_f32(sum / (f32)in.cols + in.eps);
    ROLLED for (u32 start = 0; start < end; start += 4096) {
        if (start > 0) fetch(start);
        UNROLL for (u32 p = 0; p < 4; p++) {
            const u32 k = start + (p * 256 + i) * 4;
            if (start + p * 1024 >= end) continue;
            Four y = load_four(x, k, in.cols, true);
            UNROLL for (u32 j = 0; j < 4; j++) y.v[j] = y.v[j] * factor * gain[p].v[j];
            put(k, y);
        }
    }
}
