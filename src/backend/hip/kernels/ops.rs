//! All other kernels. Each file in `kernels/` documents its arguments, accepted shapes and launch.

use super::kernels;
use crate::backend::hip::device::pointer::DevicePtr;

/// Number of the activation `x / (1 + e^-x)`.
pub const SILU: u32 = 0;
/// Number of the activation GELU (tanh form).
pub const GELU: u32 = 1;

kernels! {
    /// Embedding rows from the file's layout to f32. Grid: 256 values per workgroup, rows.
    EmbedRows [] {
        /// Row m at `m * row_bytes`.
        bytes: DevicePtr<u8>,
        /// f32 `[M][cols]`.
        x: DevicePtr<f32>,
        /// Bytes from row to row.
        row_bytes: u64,
        /// Values of a row.
        cols: u32,
        /// Factor of all values.
        scale: f32,
    }

    /// RMS norm or LayerNorm to 8-bit rows. Grid: rows.
    NormA8 [norm_a8] {
        /// f32 `[*][cols]`.
        x: DevicePtr<f32>,
        /// f32 `[cols]`.
        weight: DevicePtr<f32>,
        /// f32 `[cols]`, or null.
        bias: DevicePtr<f32>,
        /// Row numbers, or null for the first rows.
        rows: DevicePtr<u32>,
        /// i8 `[M][padded]`.
        codes: DevicePtr<i8>,
        /// f32 `[M][padded / 32]`.
        scales: DevicePtr<f32>,
        /// i16 `[M][padded / 16]`.
        sums: DevicePtr<i16>,
        /// Epsilon added to the mean square or the variance.
        eps: f32,
        /// Values of a row.
        cols: u32,
        /// Values of a row, padded with zeros to a multiple of 32.
        padded: u32,
        /// 1 subtracts the mean first (LayerNorm), 0 does not (RMS norm).
        centre: u32,
    }

    /// RMS norm or LayerNorm to f32 rows. Grid: rows.
    NormF32 [norm_f32] {
        /// f32, row r at `r * x_stride`.
        x: DevicePtr<f32>,
        /// f32 `[cols]`.
        weight: DevicePtr<f32>,
        /// f32 `[cols]`, or null.
        bias: DevicePtr<f32>,
        /// Row numbers, or null for the first rows.
        rows: DevicePtr<u32>,
        /// f32, row m at `m * out_stride`.
        out: DevicePtr<f32>,
        /// Epsilon added to the mean square or the variance.
        eps: f32,
        /// Values of a row.
        cols: u32,
        /// Values from row to row of `x`.
        x_stride: u32,
        /// Values from row to row of `out`.
        out_stride: u32,
        /// 1 subtracts the mean first (LayerNorm), 0 does not (RMS norm).
        centre: u32,
        /// 1 adds to `out`, 0 overwrites it.
        add: u32,
    }

    /// RMS norm or LayerNorm to f16 rows with a scale each. Grid: rows.
    NormX16 [norm_x16] {
        /// f32 `[*][cols]`.
        x: DevicePtr<f32>,
        /// f32 `[cols]`.
        weight: DevicePtr<f32>,
        /// f32 `[cols]`, or null.
        bias: DevicePtr<f32>,
        /// Row numbers, or null for the first rows.
        rows: DevicePtr<u32>,
        /// f16 `[M][cols]`.
        out: DevicePtr<u16>,
        /// f32 `[M]`.
        row_scales: DevicePtr<f32>,
        /// Epsilon added to the mean square or the variance.
        eps: f32,
        /// Values of a row.
        cols: u32,
        /// 1 subtracts the mean first (LayerNorm), 0 does not (RMS norm).
        centre: u32,
    }

    /// f32 rows to 8-bit rows. Grid: 1024 values per workgroup, rows.
    QuantiseA8 [quantise_a8] {
        /// f32, row m at `m * stride`.
        x: DevicePtr<f32>,
        /// i8 `[M][padded]`.
        codes: DevicePtr<i8>,
        /// f32 `[M][padded / 32]`.
        scales: DevicePtr<f32>,
        /// i16 `[M][padded / 16]`.
        sums: DevicePtr<i16>,
        /// Values from row to row.
        stride: u32,
        /// Values of a row.
        cols: u32,
        /// Values of a row, padded with zeros to a multiple of 32.
        padded: u32,
    }

    /// f32 rows to f16 rows with a scale each. Grid: rows.
    QuantiseX16 [quantise_x16] {
        /// f32, row m at `m * stride`.
        x: DevicePtr<f32>,
        /// f16 `[M][cols]`.
        out: DevicePtr<u16>,
        /// f32 `[M]`.
        row_scales: DevicePtr<f32>,
        /// Values from row to row.
        stride: u32,
        /// Values of a row.
        cols: u32,
    }

    /// `act(gate) * up` to 8-bit rows. Grid: 1024 values per workgroup, rows.
    GatedA8 [gated_a8] {
        /// f32, row m at `m * stride`.
        gate: DevicePtr<f32>,
        /// f32, row m at `m * stride`, or null: the result is `act(gate)`.
        up: DevicePtr<f32>,
        /// i8 `[M][padded]`.
        codes: DevicePtr<i8>,
        /// f32 `[M][padded / 32]`.
        scales: DevicePtr<f32>,
        /// i16 `[M][padded / 16]`.
        sums: DevicePtr<i16>,
        /// Values from row to row.
        stride: u32,
        /// Values of a row.
        cols: u32,
        /// Values of a row, padded with zeros to a multiple of 32.
        padded: u32,
        /// Activation of the gate: [`SILU`] or [`GELU`].
        activation: u32,
    }

    /// `act(gate) * up` to f32 rows. Grid: 1024 values per workgroup, rows.
    GatedF32 [gated_f32] {
        /// f32, row m at `m * stride`.
        gate: DevicePtr<f32>,
        /// f32, row m at `m * stride`, or null: the result is `act(gate)`.
        up: DevicePtr<f32>,
        /// f32 `[M][cols]`.
        out: DevicePtr<f32>,
        /// Values from row to row.
        stride: u32,
        /// Values of a row.
        cols: u32,
        /// Activation of the gate: [`SILU`] or [`GELU`].
        activation: u32,
    }

    /// `act(gate) * up` to f16 rows with a scale each. Grid: rows.
    GatedX16 [gated_x16] {
        /// f32, row m at `m * stride`.
        gate: DevicePtr<f32>,
        /// f32, row m at `m * stride`, or null: the result is `act(gate)`.
        up: DevicePtr<f32>,
        /// f16 `[M][cols]`.
        out: DevicePtr<u16>,
        /// f32 `[M]`.
        row_scales: DevicePtr<f32>,
        /// Values from row to row.
        stride: u32,
        /// Values of a row.
        cols: u32,
        /// Activation of the gate: [`SILU`] or [`GELU`].
        activation: u32,
    }

    /// Per-head norm and rotation; q to scratch, k and v to pages. Grid: 8 heads per workgroup, rows.
    RopeKv [rope_kv_f16, rope_kv_f32] {
        /// f32 `[M][(n_heads + 2 * n_kv_heads) * head_dim]`.
        qkv: DevicePtr<f32>,
        /// f32 `[head_dim]`, or null.
        q_norm: DevicePtr<f32>,
        /// f32 `[head_dim]`, or null.
        k_norm: DevicePtr<f32>,
        /// f32 `[positions][rope_dims / 2][2]`.
        angles: DevicePtr<f32>,
        /// `[M]`.
        positions: DevicePtr<u32>,
        /// `[M]`.
        row_seq: DevicePtr<u32>,
        /// `[sequences][table_stride]`.
        page_tables: DevicePtr<u32>,
        /// Addresses by page number.
        page_base: DevicePtr<u64>,
        /// f32 `[M][n_heads * head_dim]`.
        q: DevicePtr<f32>,
        /// Bytes from a page's start to the layer's state.
        layer_offset: u64,
        /// Epsilon of the per-head norm.
        eps: f32,
        /// Query heads.
        n_heads: u32,
        /// Key and value heads.
        n_kv_heads: u32,
        /// Values of a head.
        head_dim: u32,
        /// Values of a head that rotate.
        rope_dims: u32,
        /// 1 pairs the two halves of a head, 0 pairs neighbours.
        halves: u32,
        /// Entries of a page table.
        table_stride: u32,
    }

    /// Attention of few rows. Grid: KV heads times groups of g query heads, splits, rows.
    AttnDecode [
        attn_decode_f16_64_1,
        attn_decode_f16_64_2,
        attn_decode_f16_64_4,
        attn_decode_f16_64_8,
        attn_decode_f16_128_1,
        attn_decode_f16_128_2,
        attn_decode_f16_128_4,
        attn_decode_f16_128_8,
        attn_decode_f16_any_1,
        attn_decode_f16_any_4,
        attn_decode_f32_any_1,
        attn_decode_f32_any_4,
    ] {
        /// f32 `[M][n_heads * head_dim]`.
        q: DevicePtr<f32>,
        /// Row numbers, or null for the first rows.
        rows: DevicePtr<u32>,
        /// `[M]`.
        positions: DevicePtr<u32>,
        /// `[M]`.
        row_seq: DevicePtr<u32>,
        /// `[sequences][table_stride]`.
        page_tables: DevicePtr<u32>,
        /// Addresses by page number.
        page_base: DevicePtr<u64>,
        /// f32 `[R][n_heads][splits][head_dim]`.
        part_values: DevicePtr<f32>,
        /// f32 `[R][n_heads][splits][2]`.
        part_stats: DevicePtr<f32>,
        /// `[R][grid x]`, all 0 at launch.
        counters: DevicePtr<u32>,
        /// f32 `[M][n_heads * head_dim]`, or null.
        out: DevicePtr<f32>,
        /// i8 `[M][padded]`, or null.
        codes: DevicePtr<i8>,
        /// f32 `[M][padded / 32]`.
        scales: DevicePtr<f32>,
        /// i16 `[M][padded / 16]`.
        sums: DevicePtr<i16>,
        /// Bytes from a page's start to the layer's state.
        layer_offset: u64,
        /// log2(e) / sqrt(head_dim).
        scale: f32,
        /// Query heads.
        n_heads: u32,
        /// Key and value heads.
        n_kv_heads: u32,
        /// Values of a head.
        head_dim: u32,
        /// Entries of a page table.
        table_stride: u32,
        /// Values of a row, padded with zeros to a multiple of 32.
        padded: u32,
        /// Most tokens that a row sees, its own last; 0 for no limit.
        window: u32,
    }

    /// Attention of many rows. Grid: KV heads, tiles; 4 waves per workgroup.
    AttnPrefill [
        attn_prefill_f16_64,
        attn_prefill_f16_80,
        attn_prefill_f16_96,
        attn_prefill_f16_128,
        attn_prefill_f16_any,
        attn_prefill_f32_any,
    ] {
        /// f32 `[M][n_heads * head_dim]`.
        q: DevicePtr<f32>,
        /// `[T][2]`: first row, row count.
        tiles: DevicePtr<u32>,
        /// `[M]`.
        positions: DevicePtr<u32>,
        /// `[M]`.
        row_seq: DevicePtr<u32>,
        /// `[sequences][table_stride]`.
        page_tables: DevicePtr<u32>,
        /// Addresses by page number.
        page_base: DevicePtr<u64>,
        /// f32 `[M][n_heads * head_dim]`, or null.
        out: DevicePtr<f32>,
        /// f16 `[M][n_heads * head_dim]`, or null.
        out16: DevicePtr<u16>,
        /// f32 `[M]`, with `out16`.
        row_scales: DevicePtr<f32>,
        /// Bytes from a page's start to the layer's state.
        layer_offset: u64,
        /// log2(e) / sqrt(head_dim).
        scale: f32,
        /// Query heads.
        n_heads: u32,
        /// Key and value heads.
        n_kv_heads: u32,
        /// Values of a head.
        head_dim: u32,
        /// Entries of a page table.
        table_stride: u32,
        /// Most tokens that a row sees, its own last; 0 for no limit.
        window: u32,
    }

    /// The most likely token of each row. Grid: 2048 tokens per workgroup, rows.
    SampleGreedy [sample_greedy] {
        /// f32 `[L][vocab]`.
        logits: DevicePtr<f32>,
        /// `[L][grid x]`.
        parts: DevicePtr<u64>,
        /// `[L]`, all 0 at launch.
        counters: DevicePtr<u32>,
        /// `[L][8]`.
        reports: DevicePtr<u32>,
        /// Tokens of the vocabulary.
        vocab: u32,
    }

    /// Samples a token of each row by its settings, and lists the most likely ones. Runs after `sample_greedy`. Grid:
    /// rows, 1024 threads per workgroup.
    SampleDraw [sample_draw] {
        /// f32 `[L][vocab]`.
        logits: DevicePtr<f32>,
        /// `[L][8]`: temperature, top_k, top_p, ln(min_p) (minus infinity unless min_p > 0), seed low and high,
        /// position, and how many of the most likely tokens to list.
        settings: DevicePtr<u32>,
        /// `[L][8]`.
        reports: DevicePtr<u32>,
        /// `[L][top_stride][2]`, or null.
        tops: DevicePtr<u32>,
        /// Tokens of the vocabulary.
        vocab: u32,
        /// Entries of a row's list.
        top_stride: u32,
    }

    /// Chooses the experts of each row. Grid: 8 rows per workgroup.
    Route [route] {
        /// f32 `[M][count]`.
        logits: DevicePtr<f32>,
        /// `[M][used]`, best first.
        experts: DevicePtr<u32>,
        /// f32 `[M][used]`.
        weights: DevicePtr<f32>,
        /// Factor of the weights.
        scale: f32,
        /// Number of rows, M.
        rows: u32,
        /// Number of experts, at most 512.
        count: u32,
        /// Experts per row.
        used: u32,
        /// 1 normalises weights over the chosen experts, 0 over all.
        normalise: u32,
    }

    /// `out = scale * x`, or `out += scale * x`. Grid: 1024 values per workgroup, rows.
    AddRows [add_rows] {
        /// f32, row m at `m * x_stride`.
        x: DevicePtr<f32>,
        /// f32, row m at `m * out_stride`.
        out: DevicePtr<f32>,
        /// Factor of `x`.
        scale: f32,
        /// 1 adds to `out`, 0 overwrites it.
        keep: u32,
        /// Values from row to row of `x`.
        x_stride: u32,
        /// Values from row to row of `out`.
        out_stride: u32,
        /// Values of a row.
        cols: u32,
    }

    /// `x = cap * tanh(x / cap)`. Grid: 1024 values per workgroup, rows.
    CapRows [cap_rows] {
        /// f32, row m at `m * stride`.
        x: DevicePtr<f32>,
        /// Must be above 0.
        cap: f32,
        /// Values from row to row.
        stride: u32,
        /// Values of a row.
        cols: u32,
    }

    /// Gathers rows, one after the other. Grid: 1024 values per workgroup, rows.
    TakeRows [take_rows] {
        /// f32, row r at `r * x_stride`.
        x: DevicePtr<f32>,
        /// `[M]`: row numbers.
        rows: DevicePtr<u32>,
        /// f32 `[M][cols]`.
        out: DevicePtr<f32>,
        /// Values from row to row of `x`.
        x_stride: u32,
        /// Values of a row.
        cols: u32,
    }

    /// Residual += weighted sum of the experts' results. Grid: 1024 values per workgroup, rows.
    Combine [combine] {
        /// f32 `[pairs][cols]`.
        results: DevicePtr<f32>,
        /// f32 `[M][used]`.
        weights: DevicePtr<f32>,
        /// f32 `[M][cols]`.
        residual: DevicePtr<f32>,
        /// Experts of a row.
        used: u32,
        /// Values of a row.
        cols: u32,
    }
}
