// Weights as f16 rows, for the matrix units (gemm_f16): a slab of rows of a tensor at a time, small enough to stay in a cache.
//
// dequant_t(planes, weights, cols, first, rows, out)   rows `first .. first + rows` of a tensor of `weights` values in rows of `cols`,
//     to out: f16 [rows][cols rounded up to 8], the rest zeros. Rounded to nearest even; finite values past f16's range become its
//     largest. F16 weights already have this form.
//
// 256 threads a block, any number of blocks.
#include "quant/floats.h"
#include "quant/types.h"

DEV f32 within_f16(f32 v) {
    const f32 size = abs_f32(v);
    return size > 65504.0f && size < INFINITY_F32 ? (v < 0.0f ? -65504.0f : 65504.0f) : v;
}

DEV u32 two_f16(f32 low, f32 high) { return pack_f16x2(within_f16(low), within_f16(high)); }

template <class T> DEV void dequant(const u8* planes, u64 weights, u32 cols, u32 first, u32 rows, u16* out) {
    const u64 groups = u64(rows) * (cols / 32);
    const typename T::View view = T::view(planes, weights);
    for (u64 i = u64(block_x()) * 256 + thread_id(); i < groups; i += u64(grid_x()) * 256) {
        const u32 g = u32(u64(first) * (cols / 32) + i);
        f32 v[32];
        group_values<T>(T::decode(T::load(view, g), g), v);
        UNROLL for (u32 p = 0; p < 4; p++) {
            store16(out + 32 * i + 8 * p, {two_f16(v[8 * p], v[8 * p + 1]), two_f16(v[8 * p + 2], v[8 * p + 3]),
                                           two_f16(v[8 * p + 4], v[8 * p + 5]), two_f16(v[8 * p + 6], v[8 * p + 7])});
        }
    }
}

#define DEQUANT(NAME, T)                                                                                                       \
    KERNEL(256, dequant_##NAME, const u8* planes, u64 weights, u32 cols, u32 first, u32 rows, u16* out) {                      \
        wait_for_predecessor();                                                                                                \
        dequant<T>(planes, weights, cols, first, rows, out);                                                                   \
    }
DEQUANT(q8_0, Q8_0)
DEQUANT(q4_0, Q4_0)
DEQUANT(q4_1, Q4_1)
DEQUANT(q5_0, Q5_0)
DEQUANT(q5_1, Q5_1)
DEQUANT(mxfp4, MXFP4)
DEQUANT(q4_k, Q4_K)
DEQUANT(q5_k, Q5_K)
DEQUANT(q6_k, Q6_K)

// Rows are padded to 16 bytes: 8 values of bf16, but 4 of f32, so that an output chunk's second half may not exist.
KERNEL(256, dequant_bf16, const u8* planes, u64, u32 cols, u32 first, u32 rows, u16* out) {
    wait_for_predecessor();
    const u64 chunks = row_chunks<BF16>(cols);
    for (u64 i = u64(block_x()) * 256 + thread_id(); i < chunks * rows; i += u64(grid_x()) * 256) {
        f32 v[8];
        BF16::decode(plane_16(planes, chunks * first + i), v);
        store16(out + 8 * i, {two_f16(v[0], v[1]), two_f16(v[2], v[3]), two_f16(v[4], v[5]), two_f16(v[6], v[7])});
    }
}
KERNEL(256, dequant_f32, const u8* planes, u64, u32 cols, u32 first, u32 rows, u16* out) {
    wait_for_predecessor();
    const u64 in_chunks = row_chunks<F32>(cols), chunks = row_chunks<F16>(cols);
    for (u64 i = u64(block_x()) * 256 + thread_id(); i < chunks * rows; i += u64(grid_x()) * 256) {
        const u64 row = i / chunks, chunk = 2 * (i % chunks);
        f32 low[4], high[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        F32::decode(plane_16(planes, in_chunks * (first + row) + chunk), low);
        if (chunk + 1 < in_chunks) F32::decode(plane_16(planes, in_chunks * (first + row) + chunk + 1), high);
        store16(out + 8 * i, {two_f16(low[0], low[1]), two_f16(low[2], low[3]), two_f16(high[0], high[1]), two_f16(high[2], high[3])});
    }
}
