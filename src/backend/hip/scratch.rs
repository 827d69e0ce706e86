//! Room of one model for the rows of a step between kernels.

use super::{Buffer, Device, DevicePtr, Owner, Stream};
use crate::backend::{BackendError, ModelDims};

/// Rows whose splits of decode attention are worked on at a time: bounds what partial results take.
pub const ATTENTION_ROWS: usize = 8;

/// Most splits of a row's tokens (`SPLITS_MAX` of kernels/attention/splits.h).
pub const SPLITS_MAX: u32 = 128;

/// Rows from which on weights are expanded for a matrix product: below, reading them once for every eight rows is faster.
pub const MATRIX_ROWS: usize = 64;

/// Bytes of weights that are expanded at a time for many rows: they stay in the last level of cache until they are multiplied.
pub const SLAB_BYTES: usize = 32 << 20;

/// The same for fewer than [`WIDE_ROWS`] rows, where a matrix cut into slabs would leave most of a device idle.
const SLAB_BYTES_MAX: usize = 128 << 20;

/// Rows from which on a slab's product fills a large device.
pub const WIDE_ROWS: u32 = 512;

/// Rows that a step recorded for replays may have. Room for as many there always is.
pub const GRAPH_ROWS: usize = 8;

/// Rows of activations in the forms that products take.
#[derive(Debug)]
pub struct Activations {
    codes: Buffer,
    scales: Buffer,
    sums: Buffer,
    values: Buffer,
    halves: Buffer,
    row_scales: Buffer,
}

/// Where rows of activations lie in 8-bit form: `padded` codes a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct A8 {
    /// `i8[M][padded]`.
    pub codes: DevicePtr<i8>,
    /// `f32[M][padded / 32]`.
    pub scales: DevicePtr<f32>,
    /// `i16[M][padded / 16]`.
    pub sums: DevicePtr<i16>,
}

impl Activations {
    fn new(device: &Device, rows: usize, cols: usize) -> Result<Self, BackendError> {
        Self::with_halves(device, rows, cols, rows >= MATRIX_ROWS)
    }

    /// Without room for f16 rows.
    fn few(device: &Device, rows: usize, cols: usize) -> Result<Self, BackendError> {
        Self::with_halves(device, rows, cols, false)
    }

    fn with_halves(device: &Device, rows: usize, cols: usize, halves: bool) -> Result<Self, BackendError> {
        let values = rows.saturating_mul(padded(cols));
        Ok(Self {
            codes: take(device, values, 1)?,
            scales: take(device, values / 32, 4)?,
            sums: take(device, values / 16, 2)?,
            values: take(device, values, 4)?,
            halves: take(device, if halves { values } else { 0 }, 2)?,
            row_scales: take(device, rows, 4)?,
        })
    }

    /// f16 rows, and the scale of each.
    pub fn halves(&self) -> (DevicePtr<u16>, DevicePtr<f32>) {
        (self.halves.ptr(), self.row_scales.ptr())
    }

    /// The 8-bit form.
    pub fn a8(&self) -> A8 {
        A8 { codes: self.codes.ptr(), scales: self.scales.ptr(), sums: self.sums.ptr() }
    }

    /// The f32 form.
    pub fn values(&self) -> DevicePtr<f32> {
        self.values.ptr()
    }
}

/// Values of a row in whole groups: what quantised weights' rows always are.
pub fn padded(cols: usize) -> usize {
    cols.next_multiple_of(32)
}

/// A model's room.
#[derive(Debug)]
pub struct Scratch {
    /// `f32[rows][hidden]`.
    pub residual: Buffer,
    /// `f32[rows][(n_heads + 2 n_kv_heads) * head_dim]`.
    pub qkv: Buffer,
    /// `f32[rows][n_heads * head_dim]`, rotated.
    pub queries: Buffer,
    /// `f32[rows][n_heads * head_dim]`: what attention leaves where its form has to be made by a kernel of its own.
    pub attended: Buffer,
    /// Input of the next product.
    pub input: Activations,
    /// `silu(gate) * up`.
    pub gated: Activations,
    /// `f32[rows][2 * ffn]`: gate and up where no kernel does both.
    pub gate_up: Buffer,
    /// `f32[logits_rows][vocab]`.
    pub logits: Buffer,
    /// Partial results of decode attention.
    pub part_values: Buffer,
    /// Their greatest scores and sums.
    pub part_stats: Buffer,
    /// How many splits have arrived; 0 between launches.
    pub counters: Buffer,
    /// 0, 1, 2, ...
    pub row_numbers: Buffer,
    /// Expanded weights, f16.
    pub slab: Buffer,
    routing: Option<Routing>,
}

/// Room for layers of experts. Pairs are rows times experts of a row.
#[derive(Debug)]
pub struct Routing {
    /// `f32[rows][count]`.
    pub logits: Buffer,
    /// `u32[rows][used]`: numbers of experts.
    pub chosen: Buffer,
    /// `f32[rows][used]`.
    pub weights: Buffer,
    /// `silu(gate) * up` of each pair.
    pub gated: Activations,
    /// `f32[pairs][hidden]`.
    pub results: Buffer,
}

impl Scratch {
    /// Room for steps of `dims.rows_max` rows.
    ///
    /// # Errors
    /// [`BackendError`] when the device has not as much.
    pub fn new(device: &Device, stream: &Stream, dims: &ModelDims) -> Result<Self, BackendError> {
        let (rows, heads) = (dims.rows_max.max(GRAPH_ROWS), dims.n_heads * dims.head_dim);
        let f32s = |rows: usize, cols: usize| take(device, rows.saturating_mul(cols), 4);
        let attention_rows = rows.min(ATTENTION_ROWS);
        let parts = attention_rows * dims.n_heads * SPLITS_MAX as usize;
        let scratch = Self {
            residual: f32s(rows, dims.hidden)?,
            qkv: f32s(rows, heads + 2 * dims.n_kv_heads * dims.head_dim)?,
            queries: f32s(rows, heads)?,
            attended: f32s(rows, heads)?,
            input: Activations::new(device, rows, dims.hidden.max(heads))?,
            gated: Activations::new(device, rows, dims.ffn)?,
            gate_up: f32s(rows, 2 * dims.ffn)?,
            logits: f32s(dims.logits_rows_max.max(GRAPH_ROWS), dims.vocab)?,
            part_values: f32s(parts, dims.head_dim)?,
            part_stats: f32s(parts, 2)?,
            counters: take(device, attention_rows * dims.n_heads, 4)?,
            row_numbers: take(device, rows, 4)?,
            slab: take(device, if rows < MATRIX_ROWS { 0 } else { slab_bytes(dims) }, 1)?,
            routing: None,
        };
        let routing = dims.experts.as_ref().map(|experts| {
            let pairs = rows.saturating_mul(experts.used);
            Ok::<_, BackendError>(Routing {
                logits: f32s(rows, experts.count)?,
                chosen: take(device, pairs, 4)?,
                weights: f32s(rows, experts.used)?,
                gated: Activations::few(device, pairs, experts.ffn)?,
                results: f32s(pairs, dims.hidden)?,
            })
        });
        let scratch = Self { routing: routing.transpose()?, ..scratch };
        stream.fill(scratch.counters.all(), 0)?;
        let numbers: Vec<u32> = (0..rows as u32).collect();
        stream.upload(scratch.row_numbers.all(), numbers.as_slice())?;
        Ok(scratch)
    }
}

impl Scratch {
    /// Room for layers of experts.
    ///
    /// # Errors
    /// [`BackendError::Batch`] for a model without.
    pub fn routing(&self) -> Result<&Routing, BackendError> {
        self.routing.as_ref().ok_or(BackendError::Batch("experts of a model that has none"))
    }
}

fn take(device: &Device, count: usize, bytes: usize) -> Result<Buffer, BackendError> {
    let all = count.checked_mul(bytes).ok_or(BackendError::Dims("scratch exceeds the address space"))?;
    Ok(device.take(all, Owner::Scratch)?)
}

/// The largest matrix of a layer as f16, if that is not too much.
fn slab_bytes(dims: &ModelDims) -> usize {
    let widest = dims.ffn.max(dims.n_heads * dims.head_dim).saturating_mul(dims.hidden);
    widest.saturating_mul(2).clamp(SLAB_BYTES, SLAB_BYTES_MAX)
}
