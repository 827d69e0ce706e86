//! Room of one model for the rows of a step between kernels.

use super::{ALIGN, Buffer, Device, DevicePtr, Owner, Stream};
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

/// Bytes of the six buffers of [`Activations`].
type ActivationSizes = [usize; 6];

/// For `rows` rows of `cols` values; `halves`: in f16 too.
fn activation_sizes(rows: usize, cols: usize, halves: bool) -> ActivationSizes {
    let values = rows.saturating_mul(padded(cols));
    let times = |bytes: usize| values.saturating_mul(bytes);
    [
        values,
        (values / 32).saturating_mul(4),
        (values / 16).saturating_mul(2),
        times(4),
        if halves { times(2) } else { 0 },
        rows.saturating_mul(4),
    ]
}

impl Activations {
    fn new(device: &Device, sizes: ActivationSizes) -> Result<Self, BackendError> {
        let [codes, scales, sums, values, halves, row_scales] = sizes;
        Ok(Self {
            codes: take(device, codes)?,
            scales: take(device, scales)?,
            sums: take(device, sums)?,
            values: take(device, values)?,
            halves: take(device, halves)?,
            row_scales: take(device, row_scales)?,
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

/// Bytes of the buffers of [`Scratch`]; `usize::MAX` for one that no address space holds.
struct Sizes {
    /// Those that stand there by themselves, in their order there.
    plain: [usize; 11],
    input: ActivationSizes,
    gated: ActivationSizes,
    routing: Option<RoutingSizes>,
}

/// Bytes of the buffers of [`Routing`].
struct RoutingSizes {
    /// Logits, chosen, weights, results.
    plain: [usize; 4],
    gated: ActivationSizes,
}

impl Sizes {
    fn of(dims: &ModelDims) -> Self {
        let rows = dims.rows_max.max(GRAPH_ROWS);
        let words = |rows: usize, cols: usize| rows.saturating_mul(cols).saturating_mul(4);
        let heads = dims.n_heads.saturating_mul(dims.head_dim);
        let kv_heads = dims.n_kv_heads.saturating_mul(dims.head_dim);
        let attention_rows = rows.min(ATTENTION_ROWS);
        let parts = attention_rows.saturating_mul(dims.n_heads).saturating_mul(SPLITS_MAX as usize);
        let routing = dims.experts.as_ref().map(|experts| {
            let pairs = rows.saturating_mul(experts.used);
            RoutingSizes {
                plain: [
                    words(rows, experts.count),
                    words(pairs, 1),
                    words(rows, experts.used),
                    words(pairs, dims.hidden),
                ],
                gated: activation_sizes(pairs, experts.ffn, false),
            }
        });
        let halves = rows >= MATRIX_ROWS;
        Self {
            plain: [
                words(rows, dims.hidden),
                words(rows, heads.saturating_add(kv_heads.saturating_mul(2))),
                words(rows, heads),
                words(rows, heads),
                words(rows, dims.ffn.saturating_mul(2)),
                words(dims.logits_rows_max.max(GRAPH_ROWS), dims.vocab),
                words(parts, dims.head_dim),
                words(parts, 2),
                words(attention_rows, dims.n_heads),
                words(rows, 1),
                if halves { slab_bytes(dims) } else { 0 },
            ],
            input: activation_sizes(rows, dims.hidden.max(heads), halves),
            gated: activation_sizes(rows, dims.ffn, halves),
            routing,
        }
    }

    fn all(&self) -> impl Iterator<Item = usize> {
        let routing = self.routing.iter().flat_map(|r| r.plain.iter().chain(&r.gated));
        self.plain.iter().chain(&self.input).chain(&self.gated).chain(routing).copied()
    }
}

/// What [`Scratch::new`] takes of the device; `u64::MAX` when there can be no such room.
pub fn bytes(dims: &ModelDims) -> u64 {
    // An empty buffer takes a unit too: it has an address.
    let taken = |bytes: usize| bytes.max(1).checked_next_multiple_of(ALIGN).map(|bytes| bytes as u64);
    let all = Sizes::of(dims).all().try_fold(0u64, |all, bytes| all.checked_add(taken(bytes)?));
    all.unwrap_or(u64::MAX)
}

impl Scratch {
    /// Room for steps of `dims.rows_max` rows.
    ///
    /// # Errors
    /// [`BackendError`] when the device has not as much.
    pub fn new(device: &Device, stream: &Stream, dims: &ModelDims) -> Result<Self, BackendError> {
        let sizes = Sizes::of(dims);
        let routing =
            sizes.routing.map(|RoutingSizes { plain: [logits, chosen, weights, results], gated }| {
                Ok::<_, BackendError>(Routing {
                    logits: take(device, logits)?,
                    chosen: take(device, chosen)?,
                    weights: take(device, weights)?,
                    gated: Activations::new(device, gated)?,
                    results: take(device, results)?,
                })
            });
        let [residual, qkv, queries, attended, gate_up, logits, values, stats, counters, numbers, slab] =
            sizes.plain;
        let scratch = Self {
            residual: take(device, residual)?,
            qkv: take(device, qkv)?,
            queries: take(device, queries)?,
            attended: take(device, attended)?,
            input: Activations::new(device, sizes.input)?,
            gated: Activations::new(device, sizes.gated)?,
            gate_up: take(device, gate_up)?,
            logits: take(device, logits)?,
            part_values: take(device, values)?,
            part_stats: take(device, stats)?,
            counters: take(device, counters)?,
            row_numbers: take(device, numbers)?,
            slab: take(device, slab)?,
            routing: routing.transpose()?,
        };
        stream.fill(scratch.counters.all(), 0)?;
        let numbers: Vec<u32> = (0..dims.rows_max.max(GRAPH_ROWS) as u32).collect();
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

fn take(device: &Device, bytes: usize) -> Result<Buffer, BackendError> {
    if bytes > isize::MAX as usize {
        return Err(BackendError::Dims("scratch exceeds the address space"));
    }
    Ok(device.take(bytes, Owner::Scratch)?)
}

/// The largest matrix of a layer as f16, if that is not too much.
fn slab_bytes(dims: &ModelDims) -> usize {
    let widest = dims.ffn.max(dims.n_heads * dims.head_dim).saturating_mul(dims.hidden);
    widest.saturating_mul(2).clamp(SLAB_BYTES, SLAB_BYTES_MAX)
}
