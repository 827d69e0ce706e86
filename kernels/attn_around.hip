// attn_around: out = softmax(q . K / sqrt(head_dim)) V over a window that looks both ways, as tiles of neighbouring rows of one text
//
// For encoders. All rows of a text are in the step, and their keys and values in pages.
// Shapes     positions: u32[M], each row's own; ends: u32[M], that of the last row of its text
//            window: a row at position p attends to positions p - window / 2 ..= p + window / 2 from 0 to its text's end. Other
//            pages are not read, nor are their page table entries.
//            falls: 0, or 1 where a score falls by its head's slope (ALiBi, prefill.h) for each token of distance, after the cap.
//            All else is as of attn_prefill: q, tiles, row_seq, page_tables, page_base, layer_offset, scale, cap, sinks, out, out16,
//            row_scales, part_values, part_stats, counters
// Variants   attn_around_f16_<64 | 256>: f16 pages, heads of that size, on the matrix unit where the target has one;
//            attn_around_<f16 | f32>_any: f32 arithmetic, any head_dim up to 256. RDNA 3 takes it for heads of 256 too
// Requires   window > 0; n_heads / n_kv_heads <= 64
// Launch     as attn_prefill: grid = (n_kv_heads, T, blocks that share a tile's pages: 1 to 32), block = 4 waves
// Alignment  16 bytes for pages and q
// Sums in    as attn_prefill, whose arithmetic it is
// Tolerance  |got - want| <= b * sum of |weight * value|, b = 2e-5 for `any`, 4e-3 for the others, whose bound is wider by 2^-25
//            of the sum of |value|; b is 1e-3 more for scores about 200 from 0 in units of log2.
//            out16: (2^-11 + 4e-6) * |out| + 2^-25 from out
// Reference  f64 `attend` in tests/kernels/pages.rs, compared in tests/kernels/attention.rs
// Moves      4 * head_dim bytes (f16 pages) in per token that a tile sees and KV head; bound by arithmetic
#include "prelude/prelude.h"

#include "attention/prefill_matrix.h"
#include "attention/prefill_plain.h"

namespace prefill {

template <u32 HEAD> DEV void around_sized(const Task& t) {
#if HAS_MATRIX_UNIT
    if constexpr (Sizes<HEAD>::FITS) return run_matrix<HEAD, true, f16>(t);
#endif
    run_plain<f16, true>(t);
}
template <class T> DEV void around_any(const Task& t) { run_plain<T, true>(t); }

} // namespace prefill

#define ATTN_AROUND(NAME, RUN)                                                                                                 \
    KERNEL(4 * WAVE, NAME, const f32* q, const u32* tiles, const u32* positions, const u32* ends, const u32* row_seq,          \
           const u32* page_tables, const u64* page_base, f32* out, f16* out16, f32* row_scales, f32* part_values,              \
           f32* part_stats, u32* counters, const f32* sinks, u64 layer_offset, f32 scale, f32 cap, u32 n_heads,                \
           u32 n_kv_heads, u32 head_dim, u32 table_stride, u32 window, u32 falls) {                                            \
        prefill::RUN({q, tiles, positions, row_seq, page_tables, page_base, out, out16, row_scales, part_values, part_stats,   \
                      counters, sinks, layer_offset, scale, cap, n_heads, n_kv_heads, head_dim, table_stride, window, ends,    \
                      falls});                                                                                                 \
    }

ATTN_AROUND(attn_around_f16_64, around_sized<64>)
ATTN_AROUND(attn_around_f16_256, around_sized<256>)
ATTN_AROUND(attn_around_f16_any, around_any<f16>)
ATTN_AROUND(attn_around_f32_any, around_any<f32>)
