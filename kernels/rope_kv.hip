// rope_kv: q = rotate(norm(q)), k = rotate(norm(k)); q goes to scratch, k and v to their KV pages
//
// Shapes     qkv: f32[M][(n_heads + 2 * n_kv_heads) * head_dim], as q heads, k heads, v heads
//            q_norm, k_norm: f32[head_dim], each or null: x * w / sqrt(mean(x^2) + eps) over a head
//            angles: f32[positions][rope_dims / 2][2] of (cos, sin), with every scaling folded in
//            halves: 0 rotates pairs (2i, 2i + 1), else (i, i + rope_dims / 2), i < rope_dims / 2; the other values stay
//            q: f32[M][n_heads * head_dim], rotated, not scaled by 1 / sqrt(head_dim)
//            positions, row_seq: u32[M]; page_tables, page_base, layer_offset: common/pages.h
//            A row_seq of NO_SEQUENCE: q is 0, no page is written, the row's position is not used
// Variants   rope_kv_f16, rope_kv_f32: element of the pages (f16 rounds to nearest even; past 65504 it is infinite);
//            rope_kv_i8: codes from -127 to 127, an f16 scale for each 32 values. The scale is NaN if one of them is not finite
// Requires   head_dim even, 2..=256, a multiple of 32 for i8; rope_dims even, <= head_dim
// Launch     grid = (ceil((n_heads + 2 * n_kv_heads) / 8), M), block = 256: 32 lanes a head
// Alignment  16 bytes for pages; that of the element for all else
// Sums in    f32, fixed order; a head's bits depend on its row alone
// Tolerance  |got - want| <= 4e-6 * (|want| + 1); keys and values in f16 pages: (2^-11 + 4e-6) * (|want| + 1);
//            in i8 pages: 1 / 254 and 2^-11 of the greatest |want| of the 32 values, and 4e-6
// Reference  f64 in tests/kernels/rope.rs
// Moves      4 bytes in, 4 (q) or an element (k, v) out per value; bound by latency at few rows
#include "prelude/prelude.h"
#include "common/heads.h"
#include "common/pages.h"

namespace rope_kv {

template <class T>
DEV void run(const f32* qkv, const f32* q_norm, const f32* k_norm, const f32* angles, const u32* positions, const u32* row_seq,
             const u32* page_tables, const u64* page_base, f32* q, u64 layer_offset, f32 eps, u32 n_heads, u32 n_kv_heads,
             u32 head_dim, u32 rope_dims, u32 halves, u32 table_stride) {
    wait_for_predecessor();
    u32 heads = n_heads + 2 * n_kv_heads, row = block_y();
    u32 h = block_x() * (block_threads() / TEAM) + team_id();
    // Teams past the last head repeat it and store nothing: all lanes of a wave take part in sums.
    bool live = h < heads;
    if (!live) h = heads - 1;
    bool is_q = h < n_heads, is_v = h >= n_heads + n_kv_heads;
    u32 kv_head = is_q ? 0 : is_v ? h - n_heads - n_kv_heads : h - n_heads;
    u32 sequence = row_seq[row], position = positions[row];
    bool padding = sequence == NO_SEQUENCE;
    Head head{{}, {}, head_dim, rope_dims, halves != 0};
    const HeadFactors factors = head.factors(is_q ? q_norm : is_v ? nullptr : k_norm, is_v || padding ? nullptr : angles + (u64)position * rope_dims);
    head.load(qkv + ((u64)row * heads + h) * head_dim);
    if (q_norm || k_norm) head.norm(factors, eps);
    if (padding) head.clear();
    else head.rotate(factors);
    HeadScales<T> scales;
    scales.measure(head);
    if (!live) return;
    if (is_q) {
        head.store(q + ((u64)row * n_heads + h) * head_dim);
    } else if (!padding) {
        HeadPages<T> pages(page_base, page_tables, table_stride, sequence, layer_offset, n_kv_heads, kv_head, head_dim);
        T* keys = pages.keys(position / KV_PAGE_TOKENS);
        scales.store_token(head, is_v ? pages.values_of(keys) : keys, position % KV_PAGE_TOKENS);
    }
}

} // namespace rope_kv

#define ROPE_KV(NAME, T)                                                                                                       \
    KERNEL(256, NAME, const f32* qkv, const f32* q_norm, const f32* k_norm, const f32* angles, const u32* positions,           \
           const u32* row_seq, const u32* page_tables, const u64* page_base, f32* q, u64 layer_offset, f32 eps, u32 n_heads,   \
           u32 n_kv_heads, u32 head_dim, u32 rope_dims, u32 halves, u32 table_stride) {                                        \
        rope_kv::run<T>(qkv, q_norm, k_norm, angles, positions, row_seq, page_tables, page_base, q, layer_offset, eps,         \
                        n_heads, n_kv_heads, head_dim, rope_dims, halves, table_stride);                                       \
    }

ROPE_KV(rope_kv_f16, f16)
ROPE_KV(rope_kv_i8, i8)
ROPE_KV(rope_kv_f32, f32)
