// rope_kv_wide: q = rotate(q), k = rotate(k); q goes to scratch, k and v to their KV pages; heads of any width
//
// For heads wider than rope_kv takes, such as those of latent attention. They have no norms here.
// Shapes     qkv: f32[M][(n_heads + 2 * n_kv_heads) * head_dim], as q heads, k heads, v heads
//            angles, halves, q, positions, row_seq, page_tables, page_base, layer_offset: as of rope_kv
// Variants   rope_kv_wide_f16, rope_kv_wide_f32: element of the pages (f16 rounds to nearest even; past 65504 it is infinite)
// Requires   head_dim even; rope_dims even, <= head_dim
// Launch     grid = (n_heads + 2 * n_kv_heads, M), block = 256
// Alignment  16 bytes for pages; that of the element for all else
// Sums in    no sums; f32
// Tolerance  |got - want| <= 4e-6 * (|want| + 1); keys and values in f16 pages: (2^-11 + 4e-6) * (|want| + 1)
// Reference  f64 in tests/kernels/wide.rs
// Moves      4 bytes in, 4 (q) or an element (k, v) out per value; bound by latency at few rows
#include "prelude/prelude.h"
#include "common/pages.h"

namespace rope_kv_wide {

template <class T>
DEV void run(const f32* qkv, const f32* angles, const u32* positions, const u32* row_seq, const u32* page_tables,
             const u64* page_base, f32* q, u64 layer_offset, u32 n_heads, u32 n_kv_heads, u32 head_dim, u32 rope_dims, u32 halves,
             u32 table_stride) {
    wait_for_predecessor();
    const u32 h = block_x(), row = block_y(), sequence = row_seq[row], position = positions[row];
    const bool is_q = h < n_heads, is_v = h >= n_heads + n_kv_heads, padding = sequence == NO_SEQUENCE;
    if (padding && !is_q) return;
    const f32* from = qkv + ((u64)row * (n_heads + 2 * n_kv_heads) + h) * head_dim;
    f32* to = q + ((u64)row * n_heads + h) * head_dim;
    T* element = nullptr;
    if (!is_q) {
        const u32 kv_head = h - n_heads - (is_v ? n_kv_heads : 0);
        HeadPages<T> pages(page_base, page_tables, table_stride, sequence, layer_offset, n_kv_heads, kv_head, head_dim);
        T* key = pages.key(position);
        element = is_v ? pages.values_of(key) : key;
    }
    for (u32 pair = thread_id(); pair < head_dim / 2; pair += block_threads()) {
        const bool rotated = pair < rope_dims / 2, by_halves = halves != 0 && rotated;
        const u32 first = by_halves ? pair : 2 * pair, second = by_halves ? pair + rope_dims / 2 : 2 * pair + 1;
        f32 a = padding ? 0.0f : from[first], b = padding ? 0.0f : from[second];
        if (rotated && !is_v && !padding) {
            const f32* angle = angles + (u64)position * rope_dims + 2 * pair;
            const f32 x = a;
            a = x * angle[0] - b * angle[1];
            b = x * angle[1] + b * angle[0];
        }
        if (is_q) {
            to[first] = a;
            to[second] = b;
        } else {
            to_element(a, element[first]);
            to_element(b, element[second]);
        }
    }
}

} // namespace rope_kv_wide

#define ROPE_KV_WIDE(NAME, T)                                                                                                  \
    KERNEL(256, NAME, const f32* qkv, const f32* angles, const u32* positions, const u32* row_seq, const u32* page_tables,     \
           const u64* page_base, f32* q, u64 layer_offset, u32 n_heads, u32 n_kv_heads, u32 head_dim, u32 rope_dims,           \
           u32 halves, u32 table_stride) {                                                                                     \
        rope_kv_wide::run<T>(qkv, angles, positions, row_seq, page_tables, page_base, q, layer_offset, n_heads, n_kv_heads,    \
                             head_dim, rope_dims, halves, table_stride);                                                       \
    }

ROPE_KV_WIDE(rope_kv_wide_f16, f16)
ROPE_KV_WIDE(rope_kv_wide_f32, f32)
