// join_heads: out[m][h] = a part of first[m][h], then a part of second[m][h], for each head h
//
// Shapes     first: f32, the part of head h of row m at m * first_stride + h * first_head, first_width values; second likewise
//            out: f32[M][heads][first_width + second_width], no part of the others
// Launch     grid = (ceil(heads * (first_width + second_width) / 1024), M), block = 256
// Alignment  4 bytes
// Sums in    no sums: values are copied
// Tolerance  0: equal values
// Reference  the parts themselves, picked in tests/kernels/heads.rs
// Moves      4 bytes in and out per value; bound by latency
#include "prelude/prelude.h"

KERNEL(256, join_heads, const f32* first, const f32* second, f32* out, u32 first_stride, u32 first_head, u32 first_width,
       u32 second_stride, u32 second_head, u32 second_width, u32 heads) {
    wait_for_predecessor();
    const u32 width = first_width + second_width, row = block_y();
    UNROLL for (u32 i = 0; i < 4; i++) {
        const u32 k = block_x() * 1024 + i * 256 + thread_id();
        if (k >= heads * width) continue;
        const u32 h = k / width, d = k % width;
        out[(u64)row * heads * width + k] = d < first_width
            ? first[(u64)row * first_stride + h * first_head + d]
            : second[(u64)row * second_stride + h * second_head + d - first_width];
    }
}
