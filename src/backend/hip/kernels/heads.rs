//! Kernels of attention that few models need: windows that look both ways, heads made of parts, and wide heads. Each file in
//! `kernels/` documents its arguments, accepted shapes and launch.

use super::extent::{only, strided};
use super::kernels;
use crate::backend::hip::device::pointer::DevicePtr;

/// Most values of a head that [`AttnWide`] takes.
pub const WIDE_MAX: u32 = 576;
/// Query heads per workgroup of [`AttnWide`].
pub const WIDE_HEADS: u32 = 16;

kernels! { |launch|
    /// Attention of many rows within a window that looks both ways. Grid: as of `AttnPrefill`.
    AttnAround [
        attn_around_f16_64: 64,
        attn_around_f16_256: 64,
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
        /// 1 where scores fall with the distance of the tokens (ALiBi), else 0.
        falls: u32,
    }

    /// Rotation of wide heads; q to scratch, k and v to pages. Grid: heads, rows.
    RopeKvWide [rope_kv_wide_f16, rope_kv_wide_f32] {
        /// f32 `[M][(n_heads + 2 * n_kv_heads) * head_dim]`.
        qkv: DevicePtr<f32> [launch.y * launch.x.at_least(n_heads + 2 * n_kv_heads) * head_dim],
        /// f32 `[positions][rope_dims / 2][2]`. `positions` decides which are read.
        angles: DevicePtr<f32> [at least rope_dims],
        /// `[M]`.
        positions: DevicePtr<u32> [launch.y],
        /// `[M]`.
        row_seq: DevicePtr<u32> [launch.y],
        /// `[sequences][table_stride]`. `row_seq` decides which are read.
        page_tables: DevicePtr<u32> [at least only(n_kv_heads != 0, table_stride)],
        /// Addresses by page number. `page_tables` decides which are read.
        page_base: DevicePtr<u64> [at least only(n_kv_heads != 0, 1)],
        /// f32 `[M][n_heads * head_dim]`.
        q: DevicePtr<f32> [launch.y * n_heads * head_dim],
        /// Bytes from a page's start to the layer's state.
        layer_offset: u64,
        /// Query heads.
        n_heads: u32,
        /// Key and value heads.
        n_kv_heads: u32,
        /// Values of a head.
        head_dim: u32,
        /// Values of a head that rotate.
        rope_dims: u32,
        /// 1 pairs the two halves of what rotates, 0 pairs neighbours.
        halves: u32,
        /// Entries of a page table.
        table_stride: u32,
    }

    /// Attention of wide heads. Grid: KV heads times groups of 16 query heads, splits, rows.
    AttnWide [attn_wide_f16: 16, attn_wide_f32: 16] {
        /// f32 `[R][n_heads * head_dim]`.
        q: DevicePtr<f32> [launch.z * launch.heads(n_heads, n_kv_heads) * head_dim],
        /// `[R]`.
        positions: DevicePtr<u32> [launch.z],
        /// `[R]`.
        row_seq: DevicePtr<u32> [launch.z],
        /// `[sequences][table_stride]`. `row_seq` decides which are read.
        page_tables: DevicePtr<u32> [at least table_stride],
        /// Addresses by page number. `page_tables` decides which are read.
        page_base: DevicePtr<u64> [at least 1],
        /// f32 `[R][n_heads][grid y][head_dim]`, for a grid y above 1.
        part_values: DevicePtr<f32> [
            at least only(launch.y != 1, launch.z * n_heads * launch.y * head_dim)
        ],
        /// f32 `[R][n_heads][grid y][2]`, likewise.
        part_stats: DevicePtr<f32> [at least only(launch.y != 1, launch.z * n_heads * launch.y * 2)],
        /// `[R][grid x]`, all 0 at launch, likewise.
        counters: DevicePtr<u32> [at least only(launch.y != 1, launch.z * launch.x)],
        /// f32 `[R][n_heads * head_dim]`.
        out: DevicePtr<f32> [launch.z * n_heads * head_dim],
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
        /// Values of a head, even and at most [`WIDE_MAX`].
        head_dim: u32,
        /// Entries of a page table.
        table_stride: u32,
        /// Most tokens that a row sees, its own last; 0 for no limit.
        window: u32,
    }

    /// Heads of a part of each head of `first` and of `second`. Grid: 1024 values per workgroup, rows.
    JoinHeads [join_heads] {
        /// f32: the part of head h of row m at `m * first_stride + h * first_head`.
        first: DevicePtr<f32> [strided(launch.y, first_stride, strided(heads, first_head, first_width))],
        /// f32: the part of head h of row m at `m * second_stride + h * second_head`.
        second: DevicePtr<f32> [strided(launch.y, second_stride, strided(heads, second_head, second_width))],
        /// f32 `[M][heads][first_width + second_width]`.
        out: DevicePtr<f32> [launch.y * heads * (first_width + second_width)],
        /// Values from row to row of `first`.
        first_stride: u32,
        /// Values from head to head of `first`.
        first_head: u32,
        /// Values of the part of `first`.
        first_width: u32,
        /// Values from row to row of `second`.
        second_stride: u32,
        /// Values from head to head of `second`.
        second_head: u32,
        /// Values of the part of `second`.
        second_width: u32,
        /// Heads of a row.
        heads: u32,
    }
}
