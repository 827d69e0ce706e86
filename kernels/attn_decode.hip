// attn_decode: out = softmax(q . K / sqrt(head_dim)) V, causal, for few rows, each row's tokens split over blocks
//
// Shapes     q: f32[M][n_heads * head_dim], rotated; rows: u32[R], the rows to do, or null for 0..R
//            qkv: f32[M][(n_heads + 2 * n_kv_heads) * head_dim], or null. Where it is not null, the kernel norms and rotates as
//            rope_kv does, to the same bits, and q is not read. It writes each row's key and value to their pages. q_norm, k_norm, angles,
//            eps, rope_dims, pairs_by_halves: as there
//            positions, row_seq: u32[M], as attn_prefill.hip has them; NO_SEQUENCE: the result is 0; page_tables, page_base,
//            layer_offset: common/pages.h
//            window: a row at position p attends to positions max(0, p + 1 - window)..=p, or 0: to all up to p. Tokens before
//            the window are not read, nor are page table entries of pages that hold only such tokens
//            scale: log2(e) / sqrt(head_dim)
//            cap: scores x become cap * tanh(x / cap), in units of log2; or 0: they stay
//            sinks: f32[n_heads], or null: one more score of each head, whose value is 0; scale does not apply to it
//            part_values: f32[R][n_heads][S][head_dim], part_stats: f32[R][n_heads][S][2], S = grid y * each: scratch for splits
//            counters: u32[R][grid x], 0 before the first launch, and 0 again after each
//            Out, at the row's own number; each that is null is not written:
//            out: f32[M][n_heads * head_dim]; codes, scales, sums: A8 rows of `padded` values (common/activation.h);
//            halves, row_scales: X16 rows, in tiles where `tiled` is 1; their scales are 1, as a mean of f16 values fits f16
// Variants   attn_decode_<f16 | i8 | f32>_<64 | 128 | any>_<g>: element of the pages; head_dim, any up to 256, for i8 a multiple of
//            32; a block does g query heads of a KV head, so that it reads keys and values once for them.
//            attn_decode_matrix_<64 | 128>, where HAS_MATRIX_UNIT: f16 pages, that head_dim, g = 8
// Requires   with qkv: no two rows of one sequence. g <= 8; for A8: g * head_dim and n_heads / n_kv_heads * head_dim multiples of 32; for X16: head_dim a multiple of
//            4, and f16 or i8 pages (past 65504 a result of the latter is infinite).
//            attn_decode_matrix: no query times `scale` is past 65504
// Launch     grid = (n_kv_heads * ceil(n_heads / n_kv_heads / g), ceil(splits / each), R), block = 256, of attn_decode_matrix 128.
//            split_tokens (attention/splits.h) cuts a row into at most splits_max splits, and one more with a window; 128 is the most.
//            attn_decode_matrix cuts by coarse_split_tokens instead. A row has the splits that reach into its window. A block takes
//            `each` splits, one after the other. splits >= what any row has, and may be more. Blocks past a row's own splits return at once
// Alignment  16 bytes for pages and q
// Sums in    f32. A row's bits depend on its own tokens, the variant and splits_max; not on other rows, grid or `each`. Only those of
//            attn_decode_matrix depend on the wave size. Its queries and weights are sums of two f16, within 2^-21 of theirs
// Tolerance  |got - want| <= 2e-5 * sum of |weight * value|; 1.02e-3 for scores about 200 from 0 in units of log2
//            A8, X16: the bounds of tests/kernels/forms.rs around the f32 result; X16: 2^-11 * |f32 result| + 2^-25
// Reference  f64 `attend` in tests/kernels/pages.rs, compared in tests/kernels/attention.rs; with qkv: rope_kv
//            and attention of its results, bit for bit, in tests/kernels/making.rs
// Moves      4 (f16 pages) or 2.125 (i8) * head_dim bytes in per token and KV head, once per block of g heads; memory-bound, and
//            bound by latency at short lengths
#include "prelude/prelude.h"
#include "attention/decode_matrix.h"
#include "attention/decode_plain.h"

#define ATTN_DECODE_AS(KIND, NAME, ...)                                                                                        \
    KIND(NAME, const f32* q, const u32* rows, const u32* positions, const u32* row_seq, const u32* page_tables,                \
         const u64* page_base, f32* part_values, f32* part_stats, u32* counters, f32* out, i8* codes, f32* scales,             \
         i16* sums, f16* halves, f32* row_scales, const f32* sinks, u64 layer_offset, f32 scale, f32 cap, u32 n_heads,         \
         u32 n_kv_heads, u32 head_dim, u32 table_stride, u32 padded, u32 window, u32 tiled, u32 each, u32 splits_max,           \
         const f32* qkv, const f32* q_norm, const f32* k_norm, const f32* angles, f32 eps, u32 rope_dims, u32 pairs_by_halves) { \
        attn_decode::__VA_ARGS__({q, rows, positions, row_seq, page_tables, page_base, part_values, part_stats, counters, out, \
                                  codes, scales, sums, halves, row_scales, sinks, layer_offset, scale, cap, n_heads,           \
                                  n_kv_heads, head_dim, table_stride, padded, window, tiled, each, splits_max,                 \
                                  {qkv, q_norm, k_norm, angles, eps, rope_dims, pairs_by_halves}});                            \
    }
#define PLAIN(NAME, ...) KERNEL_TWICE(256, NAME, __VA_ARGS__)
#define MATRIX(NAME, ...) KERNEL_TIMES(128, 4, NAME, __VA_ARGS__)
#define ATTN_DECODE(NAME, T, LANES, G, EXACT) ATTN_DECODE_AS(PLAIN, NAME, run_plain<T, LANES, G, EXACT>)
#define ATTN_DECODE_MATRIX(NAME, HEAD) ATTN_DECODE_AS(MATRIX, NAME, run_matrix<HEAD>)

ATTN_DECODE(attn_decode_f16_64_1, f16, 8, 1, true)
ATTN_DECODE(attn_decode_f16_64_2, f16, 8, 2, true)
ATTN_DECODE(attn_decode_f16_64_4, f16, 8, 4, true)
ATTN_DECODE(attn_decode_f16_64_8, f16, 8, 8, true)
ATTN_DECODE(attn_decode_f16_128_1, f16, 16, 1, true)
ATTN_DECODE(attn_decode_f16_128_2, f16, 16, 2, true)
ATTN_DECODE(attn_decode_f16_128_4, f16, 16, 4, true)
ATTN_DECODE(attn_decode_f16_128_8, f16, 16, 8, true)
ATTN_DECODE(attn_decode_f16_any_1, f16, 32, 1, false)
ATTN_DECODE(attn_decode_f16_any_4, f16, 32, 4, false)
ATTN_DECODE(attn_decode_i8_64_1, i8, 8, 1, true)
ATTN_DECODE(attn_decode_i8_64_2, i8, 8, 2, true)
ATTN_DECODE(attn_decode_i8_64_4, i8, 8, 4, true)
ATTN_DECODE(attn_decode_i8_64_8, i8, 8, 8, true)
ATTN_DECODE(attn_decode_i8_128_1, i8, 16, 1, true)
ATTN_DECODE(attn_decode_i8_128_2, i8, 16, 2, true)
ATTN_DECODE(attn_decode_i8_128_4, i8, 16, 4, true)
ATTN_DECODE(attn_decode_i8_128_8, i8, 16, 8, true)
ATTN_DECODE(attn_decode_i8_any_1, i8, 32, 1, false)
ATTN_DECODE(attn_decode_i8_any_4, i8, 32, 4, false)
ATTN_DECODE(attn_decode_f32_any_1, f32, 32, 1, false)
ATTN_DECODE(attn_decode_f32_any_4, f32, 32, 4, false)

#if HAS_MATRIX_UNIT
ATTN_DECODE_MATRIX(attn_decode_matrix_64, 64)
ATTN_DECODE_MATRIX(attn_decode_matrix_128, 128)
#endif
