//! All other kernels. Each file in `kernels/` documents its arguments, accepted shapes and launch.

use super::extent::{a8_codes, a8_scales, a8_sums, named, named_x16, only, strided, x16};
use super::kernels;
use crate::backend::hip::device::pointer::DevicePtr;

/// Number of the activation `x / (1 + e^-x)`.
pub const SILU: u32 = 0;
/// Number of the activation GELU (tanh form).
pub const GELU: u32 = 1;
/// Number of a clamped gate: see [`Activation::Clamped`](crate::program::Activation::Clamped). Only of `Gated*`.
pub const CLAMPED: u32 = 2;
/// Number of the activation `1 / (1 + e^-x)`. Like the next two, not of `GemvGated*`.
pub const SIGMOID: u32 = 3;
/// Number of the activation that is the value itself.
pub const LINEAR: u32 = 4;
/// Number of the activation `x^2`, of negative x 0.
pub const SQUARED_RELU: u32 = 5;

/// In place of a mask's number: the row has none.
pub const NO_MASK: u32 = u32::MAX;

kernels! { |launch|
    /// Embedding rows from the file's layout to f32. Grid: 256 values per workgroup, rows.
    EmbedRows [] {
        /// Row m at `m * row_bytes`.
        bytes: DevicePtr<u8> [strided(launch.y, row_bytes, launch.file_bytes(cols))],
        /// f32 `[M][cols]`.
        x: DevicePtr<f32> [launch.y * cols],
        /// Bytes from row to row.
        row_bytes: u64,
        /// Values of a row.
        cols: u32,
        /// Factor of all values.
        scale: f32,
    }

    /// RMS norm or LayerNorm to 8-bit rows. Grid: rows.
    NormA8 [norm_a8] {
        /// f32 `[*][cols]`. `rows` decides which are read.
        x: DevicePtr<f32> [at least named(rows, launch.x, cols, cols)],
        /// f32 `[cols]`.
        weight: DevicePtr<f32> [cols],
        /// f32 `[cols]`, or null.
        bias: DevicePtr<f32> [null or cols],
        /// Row numbers, or null for the first rows.
        rows: DevicePtr<u32> [null or launch.x],
        /// i8 `[M][padded]`.
        codes: DevicePtr<i8> [a8_codes(launch.x, padded)],
        /// f32 `[M][padded / 32]`.
        scales: DevicePtr<f32> [a8_scales(launch.x, padded)],
        /// i16 `[M][padded / 16]`.
        sums: DevicePtr<i16> [a8_sums(launch.x, padded)],
        /// f32 as well, row m at `m * also_stride`; or null.
        also: DevicePtr<f32> [null or strided(launch.x, also_stride, cols)],
        /// Epsilon added to the mean square or the variance.
        eps: f32,
        /// Values of a row.
        cols: u32,
        /// Values of a row, padded with zeros to a multiple of 32.
        padded: u32,
        /// 1 subtracts the mean first (LayerNorm), 0 does not (RMS norm).
        centre: u32,
        /// Values from row to row of `also`.
        also_stride: u32,
    }

    /// RMS norm or LayerNorm to f32 rows. Grid: rows.
    NormF32 [norm_f32] {
        /// f32, row r at `r * x_stride`. `rows` decides which are read.
        x: DevicePtr<f32> [at least named(rows, launch.x, x_stride, cols)],
        /// f32 `[cols]`.
        weight: DevicePtr<f32> [cols],
        /// f32 `[cols]`, or null.
        bias: DevicePtr<f32> [null or cols],
        /// Row numbers, or null for the first rows.
        rows: DevicePtr<u32> [null or launch.x],
        /// f32, row m at `m * out_stride`.
        out: DevicePtr<f32> [strided(launch.x, out_stride, cols)],
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
        /// f32 `[*][cols]`. `rows` decides which are read.
        x: DevicePtr<f32> [at least named(rows, launch.x, cols, cols)],
        /// f32 `[cols]`.
        weight: DevicePtr<f32> [cols],
        /// f32 `[cols]`, or null.
        bias: DevicePtr<f32> [null or cols],
        /// Row numbers, or null for the first rows.
        rows: DevicePtr<u32> [null or launch.x],
        /// f16 `[M][cols]`, or tiles.
        out: DevicePtr<u16> [x16(launch.x, cols, tiled)],
        /// f32 `[M]`.
        row_scales: DevicePtr<f32> [launch.x],
        /// f32 as well, row m at `m * also_stride`; or null.
        also: DevicePtr<f32> [null or strided(launch.x, also_stride, cols)],
        /// Epsilon added to the mean square or the variance.
        eps: f32,
        /// Values of a row.
        cols: u32,
        /// 1 subtracts the mean first (LayerNorm), 0 does not (RMS norm).
        centre: u32,
        /// 1 writes tiles, as the matrix unit across waves reads them; 0 does not.
        tiled: u32,
        /// Values from row to row of `also`.
        also_stride: u32,
    }

    /// f32 rows to 8-bit rows. Grid: 1024 values per workgroup, rows.
    QuantiseA8 [quantise_a8] {
        /// f32, row m at `m * stride`.
        x: DevicePtr<f32> [strided(launch.y, stride, cols)],
        /// i8 `[M][padded]`.
        codes: DevicePtr<i8> [a8_codes(launch.y, padded)],
        /// f32 `[M][padded / 32]`.
        scales: DevicePtr<f32> [a8_scales(launch.y, padded)],
        /// i16 `[M][padded / 16]`.
        sums: DevicePtr<i16> [a8_sums(launch.y, padded)],
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
        x: DevicePtr<f32> [strided(launch.x, stride, cols)],
        /// f16 `[M][cols]`, or tiles.
        out: DevicePtr<u16> [x16(launch.x, cols, tiled)],
        /// f32 `[M]`.
        row_scales: DevicePtr<f32> [launch.x],
        /// Values from row to row.
        stride: u32,
        /// Values of a row.
        cols: u32,
        /// 1 writes tiles, as the matrix unit across waves reads them; 0 does not.
        tiled: u32,
    }

    /// `act(gate) * up` to 8-bit rows. Grid: 1024 values per workgroup, rows.
    GatedA8 [gated_a8] {
        /// f32, row m at `m * stride`.
        gate: DevicePtr<f32> [strided(launch.y, stride, cols)],
        /// f32, row m at `m * stride`, or null: the result is `act(gate)`.
        up: DevicePtr<f32> [null or strided(launch.y, stride, cols)],
        /// `[M]`: the expert of each row, or null: rows have no factors and no biases.
        experts: DevicePtr<u32> [null or launch.y],
        /// f32, one for each expert, or null. `experts` decides which are read.
        gate_factor: DevicePtr<f32> [null or at least only(!experts.is_null(), 1)],
        /// f32, one for each expert, or null. `experts` decides which are read.
        up_factor: DevicePtr<f32> [null or at least only(!experts.is_null(), 1)],
        /// f32, row e at e times `cols` rounded up to 4, or null. `experts` decides which are read.
        gate_bias: DevicePtr<f32> [null or at least only(!experts.is_null(), cols)],
        /// f32, row e at e times `cols` rounded up to 4, or null. `experts` decides which are read.
        up_bias: DevicePtr<f32> [null or at least only(!experts.is_null(), cols)],
        /// i8 `[M][padded]`.
        codes: DevicePtr<i8> [a8_codes(launch.y, padded)],
        /// f32 `[M][padded / 32]`.
        scales: DevicePtr<f32> [a8_scales(launch.y, padded)],
        /// i16 `[M][padded / 16]`.
        sums: DevicePtr<i16> [a8_sums(launch.y, padded)],
        /// Values from row to row.
        stride: u32,
        /// Values of a row.
        cols: u32,
        /// Values of a row, padded with zeros to a multiple of 32.
        padded: u32,
        /// Number of the gate's activation.
        activation: u32,
    }

    /// `act(gate) * up` to f32 rows. Grid: 1024 values per workgroup, rows.
    GatedF32 [gated_f32] {
        /// f32, row m at `m * stride`.
        gate: DevicePtr<f32> [strided(launch.y, stride, cols)],
        /// f32, row m at `m * stride`, or null: the result is `act(gate)`.
        up: DevicePtr<f32> [null or strided(launch.y, stride, cols)],
        /// `[M]`: the expert of each row, or null: rows have no factors and no biases.
        experts: DevicePtr<u32> [null or launch.y],
        /// f32, one for each expert, or null. `experts` decides which are read.
        gate_factor: DevicePtr<f32> [null or at least only(!experts.is_null(), 1)],
        /// f32, one for each expert, or null. `experts` decides which are read.
        up_factor: DevicePtr<f32> [null or at least only(!experts.is_null(), 1)],
        /// f32, row e at e times `cols` rounded up to 4, or null. `experts` decides which are read.
        gate_bias: DevicePtr<f32> [null or at least only(!experts.is_null(), cols)],
        /// f32, row e at e times `cols` rounded up to 4, or null. `experts` decides which are read.
        up_bias: DevicePtr<f32> [null or at least only(!experts.is_null(), cols)],
        /// f32 `[M][cols]`.
        out: DevicePtr<f32> [launch.y * cols],
        /// Values from row to row.
        stride: u32,
        /// Values of a row.
        cols: u32,
        /// Number of the gate's activation.
        activation: u32,
    }

    /// `act(gate) * up` to f16 rows with a scale each. Grid: rows.
    GatedX16 [gated_x16] {
        /// f32, row m at `m * stride`.
        gate: DevicePtr<f32> [strided(launch.x, stride, cols)],
        /// f32, row m at `m * stride`, or null: the result is `act(gate)`.
        up: DevicePtr<f32> [null or strided(launch.x, stride, cols)],
        /// `[M]`: the expert of each row, or null: rows have no factors and no biases.
        experts: DevicePtr<u32> [null or launch.x],
        /// f32, one for each expert, or null. `experts` decides which are read.
        gate_factor: DevicePtr<f32> [null or at least only(!experts.is_null(), 1)],
        /// f32, one for each expert, or null. `experts` decides which are read.
        up_factor: DevicePtr<f32> [null or at least only(!experts.is_null(), 1)],
        /// f32, row e at e times `cols` rounded up to 4, or null. `experts` decides which are read.
        gate_bias: DevicePtr<f32> [null or at least only(!experts.is_null(), cols)],
        /// f32, row e at e times `cols` rounded up to 4, or null. `experts` decides which are read.
        up_bias: DevicePtr<f32> [null or at least only(!experts.is_null(), cols)],
        /// f16 `[M][cols]`, or tiles.
        out: DevicePtr<u16> [x16(launch.x, cols, tiled)],
        /// f32 `[M]`.
        row_scales: DevicePtr<f32> [launch.x],
        /// Values from row to row.
        stride: u32,
        /// Values of a row.
        cols: u32,
        /// Number of the gate's activation.
        activation: u32,
        /// 1 writes tiles, as the matrix unit across waves reads them; 0 does not.
        tiled: u32,
    }

    /// Per-head norm and rotation; q to scratch, k and v to pages. Grid: 8 heads per workgroup, rows.
    RopeKv [rope_kv_f16, rope_kv_i8, rope_kv_f32] {
        /// f32 `[M][(n_heads + 2 * n_kv_heads) * head_dim]`.
        qkv: DevicePtr<f32> [launch.y * (n_heads + 2 * n_kv_heads) * head_dim],
        /// f32 `[head_dim]`, or null.
        q_norm: DevicePtr<f32> [null or head_dim],
        /// f32 `[head_dim]`, or null.
        k_norm: DevicePtr<f32> [null or head_dim],
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
        attn_decode_f16_64_2: 2,
        attn_decode_f16_64_4: 4,
        attn_decode_f16_64_8: 8,
        attn_decode_f16_128_1,
        attn_decode_f16_128_2: 2,
        attn_decode_f16_128_4: 4,
        attn_decode_f16_128_8: 8,
        attn_decode_f16_any_1,
        attn_decode_f16_any_4: 4,
        attn_decode_i8_64_1,
        attn_decode_i8_64_2: 2,
        attn_decode_i8_64_4: 4,
        attn_decode_i8_64_8: 8,
        attn_decode_i8_128_1,
        attn_decode_i8_128_2: 2,
        attn_decode_i8_128_4: 4,
        attn_decode_i8_128_8: 8,
        attn_decode_i8_any_1,
        attn_decode_i8_any_4: 4,
        attn_decode_f32_any_1,
        attn_decode_f32_any_4: 4,
        attn_decode_matrix_64: 8 on OfWave,
        attn_decode_matrix_128: 8 on OfWave,
    ] {
        /// f32 `[M][n_heads * head_dim]`. `rows` decides which rows. Not read with `qkv`.
        q: DevicePtr<f32> [
            at least only(
                qkv.is_null(),
                named(rows, launch.z, n_heads * head_dim, launch.heads(n_heads, n_kv_heads) * head_dim)
            )
        ],
        /// Row numbers, or null for the first rows.
        rows: DevicePtr<u32> [null or launch.z],
        /// `[M]`. `rows` decides which rows.
        positions: DevicePtr<u32> [at least named(rows, launch.z, 1, 1)],
        /// `[M]`. `rows` decides which rows.
        row_seq: DevicePtr<u32> [at least named(rows, launch.z, 1, 1)],
        /// `[sequences][table_stride]`. `row_seq` decides which are read.
        page_tables: DevicePtr<u32> [at least table_stride],
        /// Addresses by page number. `page_tables` decides which are read.
        page_base: DevicePtr<u64> [at least 1],
        /// f32 `[R][n_heads][grid y * each][head_dim]`.
        part_values: DevicePtr<f32> [launch.z * n_heads * launch.y * each * head_dim],
        /// f32 `[R][n_heads][grid y * each][2]`.
        part_stats: DevicePtr<f32> [launch.z * n_heads * launch.y * each * 2],
        /// `[R][grid x]`, all 0 at launch.
        counters: DevicePtr<u32> [launch.z * launch.x],
        /// f32 `[M][n_heads * head_dim]`, or null. `rows` decides which rows.
        out: DevicePtr<f32> [null or at least named(rows, launch.z, n_heads * head_dim, n_heads * head_dim)],
        /// i8 `[M][padded]`, or null. `rows` decides which rows.
        codes: DevicePtr<i8> [
            null or at least named(rows, launch.z, padded, padded.at_least(n_heads * head_dim))
        ],
        /// f32 `[M][padded / 32]`. `rows` decides which rows.
        scales: DevicePtr<f32> [
            at least only(!codes.is_null(), named(rows, launch.z, padded / 32, padded / 32))
        ],
        /// i16 `[M][padded / 16]`. `rows` decides which rows.
        sums: DevicePtr<i16> [
            at least only(!codes.is_null(), named(rows, launch.z, padded / 16, padded / 16))
        ],
        /// f16 `[M][n_heads * head_dim]` or tiles of the first rows, or null. `rows` decides which rows of the former.
        halves: DevicePtr<u16> [
            null or at least named_x16(rows, launch.z, n_heads * head_dim, tiled)
        ],
        /// f32 `[M]`, with `halves`. `rows` decides which rows.
        row_scales: DevicePtr<f32> [at least only(!halves.is_null(), named(rows, launch.z, 1, 1))],
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
        /// Values of a row, padded with zeros to a multiple of 32.
        padded: u32,
        /// Most tokens that a row sees, its own last; 0 for no limit.
        window: u32,
        /// 1 writes `halves` in tiles, as the matrix unit across waves reads them; 0 does not.
        tiled: u32,
        /// Splits that a workgroup takes, one after the other.
        each: u32,
        /// Most splits of what a row sees; a window may reach into one more. Not read on a matrix unit.
        splits_max: u32,
        /// f32 `[M][(n_heads + 2 * n_kv_heads) * head_dim]`: heads before norm and rotation, which the kernel makes
        /// itself, no two rows of one sequence; or null. `rows` decides which rows.
        qkv: DevicePtr<f32> [
            null or at least named(
                rows,
                launch.z,
                (n_heads + 2 * n_kv_heads) * head_dim,
                (launch.heads(n_heads, n_kv_heads) + 2 * n_kv_heads) * head_dim
            )
        ],
        /// f32 `[head_dim]`, or null.
        q_norm: DevicePtr<f32> [null or head_dim],
        /// f32 `[head_dim]`, or null.
        k_norm: DevicePtr<f32> [null or head_dim],
        /// f32 `[positions][rope_dims / 2][2]`. `positions` decides which are read.
        angles: DevicePtr<f32> [at least rope_dims],
        /// Epsilon of the per-head norm.
        eps: f32,
        /// Values of a head that rotate; 0 without `qkv`.
        rope_dims: u32,
        /// 1 pairs the two halves of a head, 0 pairs neighbours.
        pairs_by_halves: u32,
    }

    /// Attention of many rows. Grid: KV heads, tiles, workgroups that share a tile's tokens; 4 waves per workgroup, or 8 on the
    /// matrix unit across waves.
    AttnPrefill [
        attn_prefill_f16_64: 64,
        attn_prefill_f16_80: 64,
        attn_prefill_f16_96: 64,
        attn_prefill_f16_128: 64,
        attn_prefill_f16_256: 64,
        attn_prefill_f16_any: 64,
        attn_prefill_i8_64: 64,
        attn_prefill_i8_96: 64,
        attn_prefill_i8_128: 64,
        attn_prefill_i8_256: 64,
        attn_prefill_i8_any: 64,
        attn_prefill_f32_any: 64,
        attn_prefill_wide_f16_64: 128 on AcrossWaves,
        attn_prefill_wide_f16_128: 128 on AcrossWaves,
    ] {
        /// f32 `[M][n_heads * head_dim]`. `tiles` decides which rows.
        q: DevicePtr<f32> [at least launch.heads(n_heads, n_kv_heads) * head_dim],
        /// `[T][2]`: first row, row count.
        tiles: DevicePtr<u32> [2 * launch.y],
        /// `[M]`. `tiles` decides which rows.
        positions: DevicePtr<u32> [at least 1],
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
        /// f32 `[T][n_kv_heads][grid z][queries][head_dim]`, for a grid z above 1; a tile has up to 64 queries, or 128.
        part_values: DevicePtr<f32> [
            at least only(launch.z != 1, launch.x * launch.y * launch.z * launch.columns() * head_dim)
        ],
        /// f32 `[T][n_kv_heads][grid z][queries][2]`, likewise.
        part_stats: DevicePtr<f32> [
            at least only(launch.z != 1, launch.x * launch.y * launch.z * launch.columns() * 2)
        ],
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
        /// Most tokens that a row sees, its own last; 0 for no limit.
        window: u32,
    }

    /// Changes of logits before a token is drawn, then masks. Grid: 2048 tokens per workgroup, rows.
    AdjustRows [adjust_rows] {
        /// f32 `[L][vocab]`.
        logits: DevicePtr<f32> [launch.y * vocab],
        /// `[L][4]`: first change, number of changes, number of the mask or [`NO_MASK`], 0.
        rows: DevicePtr<u32> [4 * launch.y],
        /// `[changes of all rows][5]`: token id, bits of `bias`, `repeat` and `less`, and of the logit as it was; or null.
        /// `rows` decides which are used.
        changes: DevicePtr<u32> [null or at least 5],
        /// `[masked rows][mask_words]`: bits of the tokens that may be drawn; or null. `rows` decides which are read.
        masks: DevicePtr<u32> [null or at least mask_words],
        /// Tokens of the vocabulary.
        vocab: u32,
        /// Words of a mask.
        mask_words: u32,
    }

    /// The most likely token of each row. Grid: 2048 tokens per workgroup, rows.
    SampleGreedy [sample_greedy] {
        /// f32 `[L][vocab]`.
        logits: DevicePtr<f32> [launch.y * vocab],
        /// `[L][grid x]`.
        parts: DevicePtr<u64> [launch.y * launch.x],
        /// `[L]`, all 0 at launch.
        counters: DevicePtr<u32> [launch.y],
        /// `[L][8]`.
        reports: DevicePtr<u32> [8 * launch.y],
        /// Tokens of the vocabulary.
        vocab: u32,
    }

    /// Samples a token of each row by its settings, and lists the most likely ones. Runs after `sample_greedy`. Grid:
    /// rows, 1024 threads per workgroup.
    SampleDraw [sample_draw] {
        /// f32 `[L][vocab]`.
        logits: DevicePtr<f32> [launch.x * vocab],
        /// `[L][8]`: temperature, top_k, top_p, ln(min_p) (minus infinity unless min_p > 0), seed low and high,
        /// position, and how many of the most likely tokens to list.
        settings: DevicePtr<u32> [8 * launch.x],
        /// `[L][8]`.
        reports: DevicePtr<u32> [8 * launch.x],
        /// `[L][top_stride][2]`, or null.
        tops: DevicePtr<u32> [null or launch.x * top_stride * 2],
        /// Tokens of the vocabulary.
        vocab: u32,
        /// Entries of a row's list.
        top_stride: u32,
    }

    /// `out = scale * x`, or `out += scale * x`. Grid: 1024 values per workgroup, rows.
    AddRows [add_rows] {
        /// f32, row m at `m * x_stride`.
        x: DevicePtr<f32> [strided(launch.y, x_stride, cols)],
        /// f32, row m at `m * out_stride`.
        out: DevicePtr<f32> [strided(launch.y, out_stride, cols)],
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
        x: DevicePtr<f32> [strided(launch.y, stride, cols)],
        /// Must be above 0.
        cap: f32,
        /// Values from row to row.
        stride: u32,
        /// Values of a row.
        cols: u32,
    }

    /// `x *= 1 / (1 + e^-gate)`, one gate for each row. Grid: 1024 values per workgroup, rows.
    OpenRows [open_rows] {
        /// f32, that of row m at `m * gate_stride`.
        gate: DevicePtr<f32> [strided(launch.y, gate_stride, 1.into())],
        /// f32, row m at `m * stride`.
        x: DevicePtr<f32> [strided(launch.y, stride, cols)],
        /// Values from gate to gate.
        gate_stride: u32,
        /// Values from row to row.
        stride: u32,
        /// Values of a row.
        cols: u32,
    }

    /// Gathers rows, one after the other. Grid: 1024 values per workgroup, rows.
    TakeRows [take_rows] {
        /// f32, row r at `r * x_stride`. `rows` decides which are read.
        x: DevicePtr<f32> [at least cols],
        /// `[M]`: row numbers.
        rows: DevicePtr<u32> [launch.y],
        /// f32 `[M][cols]`.
        out: DevicePtr<f32> [launch.y * cols],
        /// Values from row to row of `x`.
        x_stride: u32,
        /// Values of a row.
        cols: u32,
    }

}
