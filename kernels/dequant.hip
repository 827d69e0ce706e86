// dequant: out[r][k] = f16(weight[first + r][k]), weights as f16 rows for gemm_f16
//
// The caller dequantises a slab of rows at a time, small enough to stay in a cache. F16 weights already have this form.
// Shapes     planes: a tensor of `weights` values in rows of `cols` (quant/planes.h); rows first .. first + rows of it go to
//            out: f16[rows][cols rounded up to 8], 0 past cols
// Variants   dequant_<type>, type bf16 f32 and all of quant/list.h
// Requires   cols a multiple of the type's block
// Launch     grid = any width, block = 256: a lane makes 32 values of a quantised type or 8 of a float type at a time
// Alignment  16 bytes for planes and out
// Sums in    no sums; values in f32, then rounded to nearest even. Finite values past f16's range become its largest
// Tolerance  0: equal values
// Reference  ggml's values (tests/golden/quant-blocks.bin) rounded by the crate half, in tests/kernels/matmul/layout.rs
// Moves      8 to 34 bytes in per 32 values of a quantised type, 2 or 4 per value of a float type, 2 out per value;
//            memory-bound
#include "quant/floats.h"
#include "quant/list.h"
#include "quant/small.h"
#include "quant/small_floats.h"

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
QUANT_TYPES(DEQUANT)

// Rows are padded to 16 bytes: 8 values of bf16, but 4 of f32. So for f32 the second half of an output chunk may not exist.
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
