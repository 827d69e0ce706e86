//! Kernels of attention that few models need: windows that look both ways. Each file in `kernels/` documents its arguments,
//! accepted shapes and launch.

use super::extent::only;
use super::kernels;
use crate::backend::hip::device::pointer::DevicePtr;

kernels! { |launch|
    /// Attention of many rows within a window that looks both ways. Grid: as of `AttnPrefill`.
    AttnAround [
        attn_around_f16_64: 64,
        attn_around_f16_any: 64,
        attn_around_f32_any: 64,
    ] {
        /// f32 `[M][n_heads * head_dim]`. `tiles` decides which rows.
        q: DevicePtr<f32> [at least launch.heads(n_heads, n_kv_heads) * head_dim],
        /// `[T][2]`: first row, row count.
        tiles: DevicePtr<u32> [2 * launch.y],
        /// `[M]`. `tiles` decides which rows.
        positions: DevicePtr<u32> [at least 1],
        /// `[M]`: position of the last row of each row's text. `tiles` decides which rows.
        ends: DevicePtr<u32> [at least 1],
        /// `[M]`. `tiles` decides which rows.
        row_seq: DevicePtr<u32> [at least 1],
        /// `[sequences][table_stride]`. `row_seq` decides which are read.
        page_tables: DevicePtr<u32> [at least table_stride],
        /// Addresses by page number. `page_tables` decides which are read.
        page_base: DevicePtr<u64> [at least 1],
        /// f32 `[M][n_heads * head_dim]`, or null. `tiles` decides which rows.
        out: DevicePtr<f32> [null or at least n_heads * head_dim],
        /// f16 `[M][n_heads * head_dim]`, or null. `tiles` decides which rows.
        out16: DevicePtr<u16> [null or at least n_heads * head_dim],
        /// f32 `[M]`, with `out16`. `tiles` decides which rows.
        row_scales: DevicePtr<f32> [at least only(!out16.is_null(), 1)],
        /// f32 `[T][n_kv_heads][grid z][64][head_dim]`, for a grid z above 1.
        part_values: DevicePtr<f32> [
            at least only(launch.z != 1, launch.x * launch.y * launch.z * 64 * head_dim)
        ],
        /// f32 `[T][n_kv_heads][grid z][64][2]`, likewise.
        part_stats: DevicePtr<f32> [at least only(launch.z != 1, launch.x * launch.y * launch.z * 64 * 2)],
        /// `[T][n_kv_heads]`, all 0 at launch, likewise.
        counters: DevicePtr<u32> [at least only(launch.z != 1, launch.x * launch.y)],
        /// f32 `[n_heads]`: one more score of each head, whose value is 0; or null.
        sinks: DevicePtr<f32> [null or n_heads],
        /// Bytes from a page's start to the layer's state.
        layer_offset: u64,
        /// log2(e) / sqrt(head_dim), so scores are in units of log2.
        scale: f32,
        /// Scores x become `cap * tanh(x / cap)`, in units of log2; 0 for no cap.
        cap: f32,
        /// Query heads.
        n_heads: u32,
        /// Key and value heads.
        n_kv_heads: u32,
        /// Values of a head.
        head_dim: u32,
        /// Entries of a page table.
        table_stride: u32,
        /// Half of it are the tokens that a row sees before its own, and after it. Not 0.
        window: u32,
    }
}
