// combine: residual[m] += sum over j of weights[m][j] * (factor[e] * results[m * used + j] + bias[e]), e = experts[m * used + j]
//
// Shapes     results: f32[M * used][cols]; weights: f32[M][used]; residual: f32[M][cols]
//            experts: u32[M * used], each an expert or NO_EXPERT (common/experts.h): no factor and no bias; or null: none for
//            all. factor: f32, a number for each expert. bias: f32, row e at e * (cols rounded up to 4). Each may be null; none is
//            read without experts
// Launch     grid = (ceil(cols / 1024), M), block = 256
// Alignment  16 bytes for all planes. If cols is not a multiple of 4, values are read and written one by one
// Sums in    f32, j rising, then added to the residual: no bit depends on other rows
// Tolerance  |got - want| <= 1e-6 * (|residual| + sum over j of |weight * result|)
// Reference  f64 sums in tests/kernels/experts.rs
// Moves      4 * cols * (used + 1) bytes in, 4 * cols out per row; memory-bound
#include "prelude/prelude.h"
#include "common/activation.h"
#include "common/experts.h"

KERNEL(256, combine, const f32* results, const f32* weights, const u32* experts, const f32* factor, const f32* bias, f32* residual,
       u32 used, u32 cols) {
    wait_for_predecessor();
    u32 row = block_y(), k = (block_x() * block_threads() + thread_id()) * 4;
    if (k >= cols) return;
    bool wide = rows_are_wide(results, cols) && rows_are_wide(residual, cols);
    f32* to = residual + (u64)row * cols;
    Four before = load_four(to, k, cols, wide), sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
    // Loads of eight experts are in flight together: they are most of the time.
    for (u32 first = 0; first < used; first += 8) {
        f32 weight[8];
        Four result[8];
        UNROLL for (u32 j = 0; j < 8; j++) {
            const u32 pair = row * used + min_u32(first + j, used - 1);
            weight[j] = weights[pair];
            result[j] = load_four(results + (u64)pair * cols, k, cols, wide);
            const u32 expert = experts ? experts[pair] : NO_EXPERT;
            if (expert == NO_EXPERT) continue;
            const f32 by = factor ? factor[expert] : 1.0f;
            UNROLL for (u32 i = 0; i < 4; i++) result[j].v[i] *= by;
            if (!bias) continue;
            const Four more = load_four(bias + (u64)expert * (ceil_div(cols, 4) * 4), k, cols, wide);
            UNROLL for (u32 i = 0; i < 4; i++) result[j].v[i] += more.v[i];
        }
        UNROLL for (u32 j = 0; j < 8; j++) {
            if (first + j >= used) continue;
            UNROLL for (u32 i = 0; i < 4; i++) sum.v[i] = fma_f32(weight[j], result[j].v[i], sum.v[i]);
        }
    }
    UNROLL for (u32 i = 0; i < 4; i++) before.v[i] += sum.v[i];
    store_four(to, k, cols, wide, before);
}
