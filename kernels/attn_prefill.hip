// attn_prefill: out = softmax(q . K / sqrt(head_dim)) V, causal, for many rows, as tiles of neighbouring rows of one sequence
//
// Shapes     q: f32[M][n_heads * head_dim], rotated; tiles: u32[T][2], each first row and number of rows: rows of one sequence,
//            positions rising by 1, or equal ones, rows * (n_heads / n_kv_heads) <= 64. Tiles of `wide` have up to 128 queries.
//            Rows in no tile are not touched
//            positions, row_seq: u32[M]; no NO_SEQUENCE in a tile; page_tables, page_base, layer_offset: common/pages.h. A position is
//            the last that its row sees: the row's own, or for rows that see later tokens too, that of the text's end
//            window: a row at position p attends to positions max(0, p + 1 - window)..=p, or 0: to all up to p. Pages that no
//            row of a tile sees are not read, nor are their page table entries
//            scale: log2(e) / sqrt(head_dim)
//            cap: scores x become cap * tanh(x / cap), in units of log2; or 0: they stay
//            sinks: f32[n_heads], or null: one more score of each head, whose value is 0; scale does not apply to it
//            Out, each that is null is not written: out: f32[M][n_heads * head_dim]; out16: f16[M][n_heads * head_dim] with
//            f32 row_scales[M], which become 1 (a weighted mean of f16 values is in f16's range: not for f32 pages.
//            Of codes it is, unless values are past 65504)
//            part_values: f32[T][n_kv_heads][grid z][64][head_dim], part_stats: f32[T][n_kv_heads][grid z][64][2] (`wide`: 128
//            for 64): scratch, and counters: u32[T][n_kv_heads], 0 before the first launch, and 0 again after each; not used for
//            grid z 1
// Variants   attn_prefill_<f16 | i8>_<64 | 80 | 96 | 128 | 256>: element of the pages, that head_dim (80: f16 alone), on the
//            matrix unit where the target has one; attn_prefill_<f16 | i8 | f32>_any: f32 arithmetic, any head_dim up to 256.
//            RDNA 3, whose registers do not hold queries and sums of 256, takes that arithmetic for them too.
//            attn_prefill_wide_f16_<64 | 128>: on the wide matrix unit, where there is one
// Requires   n_heads / n_kv_heads <= 64; for i8: head_dim a multiple of 32
// Launch     grid = (n_kv_heads, T, blocks that share a tile's pages: 1 to 32), block = 4 waves. Tiles of late positions take
//            longest: put them first. `wide`: block = 8 waves; dynamic LDS for 5 steps of 64 tokens' keys and values, and 1024
//            bytes more
// Alignment  16 bytes for pages and q; for `wide` also 8 for out and part_values, 4 for out16
// Sums in    f32, pages in rising order (`wide`: two at a time), then the blocks' parts. On the matrix unit queries (times scale), weights and
//            products of codes and scales are rounded to f16. A row's bits depend on its own tokens, and with grid z above 1 on
//            the tile's first and last token. The matrix unit makes one exception. A value that is NaN or infinite, and that some
//            row of a tile sees, reaches the tile's other rows too. All of them are of the same sequence
// Tolerance  |got - want| <= b * sum of |weight * value|, b = 2e-5 for `any`, 4e-3 for the others, whose bound is wider by 2^-25
//            of the sum of |value|; b is 1e-3 more for scores about 200 from 0 in units of log2.
//            out16: (2^-11 + 4e-6) * |out| + 2^-25 from out
// Reference  f64 `attend` in tests/kernels/pages.rs, compared in tests/kernels/attention.rs
// Moves      4 (f16 pages) or 2.125 (i8) * head_dim bytes in per token, KV head and tile; bound by arithmetic
#include "prelude/prelude.h"

#include "attention/prefill_matrix.h"
#include "attention/prefill_plain.h"
#include "attention/prefill_wide.h"

namespace prefill {

template <u32 HEAD, class T> DEV void run_sized(const Task& t) {
#if HAS_MATRIX_UNIT
    if constexpr (Sizes<HEAD>::FITS) return run_matrix<HEAD, false, T>(t);
#endif
    run_plain<T, false>(t);
}
template <class T> DEV void run_any(const Task& t) { run_plain<T, false>(t); }

} // namespace prefill

#define ATTN_PREFILL_OF(THREADS, NAME, ...)                                                                                    \
    KERNEL(THREADS, NAME, const f32* q, const u32* tiles, const u32* positions, const u32* row_seq, const u32* page_tables,   \
           const u64* page_base, f32* out, f16* out16, f32* row_scales, f32* part_values, f32* part_stats, u32* counters,      \
           const f32* sinks, u64 layer_offset, f32 scale, f32 cap, u32 n_heads, u32 n_kv_heads, u32 head_dim,                  \
           u32 table_stride, u32 window) {                                                                                     \
        prefill::__VA_ARGS__({q, tiles, positions, row_seq, page_tables, page_base, out, out16, row_scales, part_values,       \
                              part_stats, counters, sinks, layer_offset, scale, cap, n_heads, n_kv_heads, head_dim,            \
                              table_stride, window});                                                                          \
    }

#define ATTN_PREFILL(NAME, ...) ATTN_PREFILL_OF(4 * WAVE, NAME, __VA_ARGS__)

ATTN_PREFILL(attn_prefill_f16_64, run_sized<64, f16>)
ATTN_PREFILL(attn_prefill_f16_80, run_sized<80, f16>)
ATTN_PREFILL(attn_prefill_f16_96, run_sized<96, f16>)
ATTN_PREFILL(attn_prefill_f16_128, run_sized<128, f16>)
ATTN_PREFILL(attn_prefill_f16_256, run_sized<256, f16>)
ATTN_PREFILL(attn_prefill_f16_any, run_any<f16>)
ATTN_PREFILL(attn_prefill_i8_64, run_sized<64, i8>)
ATTN_PREFILL(attn_prefill_i8_96, run_sized<96, i8>)
ATTN_PREFILL(attn_prefill_i8_128, run_sized<128, i8>)
ATTN_PREFILL(attn_prefill_i8_256, run_sized<256, i8>)
ATTN_PREFILL(attn_prefill_i8_any, run_any<i8>)
ATTN_PREFILL(attn_prefill_f32_any, run_any<f32>)

#if HAS_WIDE_MATRIX
ATTN_PREFILL_OF(prefill::WIDE_THREADS, attn_prefill_wide_f16_64, run_wide<64>)
ATTN_PREFILL_OF(prefill::WIDE_THREADS, attn_prefill_wide_f16_128, run_wide<128>)
#endif
