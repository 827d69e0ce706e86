// router: y = x * gain / sqrt(mean(x^2) + eps); experts and weights as route chooses them by the logits W y (+ w_bias)
//
// Shapes     x: f32[M][cols]; gain: f32[cols]; w: f32[count][cols], of type F32 on the device; w_bias: f32[count], or null
//            codes, scales, sums: A8 rows of y, of `padded` values (common/activation.h)
//            logits: f32[M][count], scratch; counters: u32[M], 0 before the first launch, and 0 again after each
//            bias, row_seq, table, experts, weights, absent, scale, used, normalise, sigmoid: as of route
// Requires   1 <= used <= count <= 512; cols a multiple of 4, at most 4096; padded a multiple of 32, >= cols, at most 4096
// Launch     grid = (ceil(count / 8), M), block = 256
// Alignment  16 bytes for all planes
// Sums in    f32: the bits of norm_a8 and norm_f32 with blocks of 256, gemv_f32_f32_1 and route, one after the other
// Tolerance  0
// Reference  these four launches, in tests/kernels/router.rs
// Moves      w once per row, 8 * cols bytes more per workgroup from a cache; bound by latency. Weights do not depend on the launch
//            before, so they are on their way when it ends
#include "prelude/prelude.h"
#include "common/routing.h"
#include "common/row_norm.h"

namespace router_product {

constexpr u32 COLS = 4096;
// Experts of a block, one for each team.
constexpr u32 EXPERTS = 8;
// Units of 4 weights that a lane has in flight.
constexpr u32 FLIGHT = 16;

// Sum over a team in the order of gemv/dots.h.
DEV f32 sum_of_team(f32 v) {
    UNROLL for (u32 mask = TEAM / 2; mask > 0; mask /= 2) v += shfl_xor(v, mask);
    return v;
}

// A lane's part of a row of weights: units lane, lane + 32, ...
struct Weights {
    const f32* row;
    u32 units;
    u32x4 v[FLIGHT];

    // From unit `at` on. Past the end it loads the last unit again; the activations there are zeros.
    DEV void load(u32 at) {
        UNROLL for (u32 u = 0; u < FLIGHT; u++) v[u] = load16(row + 4 * min_u32(at + u * TEAM + team_lane(), units - 1));
    }
    DEV f32 multiply(const f32x4* y, u32 at, f32 sum) const {
        UNROLL for (u32 u = 0; u < FLIGHT; u++) {
            if (at + u * TEAM >= units) continue;
            const f32x4 x = y[at + u * TEAM + team_lane()];
            sum = fma_f32(as_f32(v[u].x), x.x, sum);
            sum = fma_f32(as_f32(v[u].y), x.y, sum);
            sum = fma_f32(as_f32(v[u].z), x.z, sum);
            sum = fma_f32(as_f32(v[u].w), x.w, sum);
        }
        return sum;
    }
};

} // namespace router_product

KERNEL(256, router, const f32* x, const f32* gain, const f32* w, const f32* w_bias, i8* codes, f32* scales, i16* sums, f32* logits,
       u32* counters, const f32* bias, const u32* row_seq, const u64* table, u32* experts, f32* weights, u32* absent, f32 eps,
       f32 scale, u32 cols, u32 padded, u32 count, u32 used, u32 normalise, u32 sigmoid) {
    using namespace router_product;
    LDS(y, f32x4[COLS / 4]);
    LDS(room, f32[TEAMS_MAX]);
    const u32 row = block_y(), expert = block_x() * EXPERTS + team_id();
    Weights mine = {w + u64(min_u32(expert, count - 1)) * cols, cols / 4, {}};
    mine.load(0);
    const row_norm::Row normed({x, gain, nullptr, nullptr, eps, cols, cols, 0}, row, room);
    // Whole rounds of a team, so that no lane of it reads past what is written.
    const u32 end = ceil_div(padded, TEAM * 4) * (TEAM * 4);
    const A8Row a8 = a8_row(codes, scales, sums, row, padded);
    normed.each(end, [&](u32 k, const Four& v) {
        if (k < end) y[k / 4] = {v.v[0], v.v[1], v.v[2], v.v[3]};
        if (block_x() == 0) store_a8(a8, k, padded, v);
    });
    barrier_lds();
    f32 sum = 0.0f;
    ROLLED for (u32 at = 0; at < mine.units; at += FLIGHT * TEAM) {
        if (at > 0) mine.load(at);
        sum = mine.multiply(y, at, sum);
    }
    sum = sum_of_team(sum);
    if (team_lane() == 0 && expert < count) {
        const f32 before = w_bias != nullptr ? w_bias[expert] : 0.0f;
        logits[u64(row) * count + expert] = before + sum;
    }
    if (!last_block(counters + row, grid_x())) return;
    routing::choose<false>({logits, bias, row_seq, table, experts, weights, absent, scale, count, used, normalise, sigmoid}, row);
}
