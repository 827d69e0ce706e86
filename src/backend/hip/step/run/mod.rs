//! Launches of each unit of a bound program.

mod attention;
mod experts;
mod forms;
mod gate;
mod heads;
mod prefill;
mod product;
mod recurrent;
mod rows;
mod streams;
mod wide;

pub use attention::{attend_leaves_floats, splits_of};
pub use experts::ExpertTable;
use gate::Terms;
pub use prefill::{TILE_QUERIES, tile_queries, tiles};

use crate::backend::BackendError;
use crate::backend::hip::step::arrays::{Layout, Places};
use crate::backend::hip::step::bind::{Bound, Operand, PlaneId, Product, Unit, View, Work};
use crate::backend::hip::step::scratch::Scratch;
use crate::backend::hip::{Device, DevicePtr, Stream};
use crate::program::{Activation, Rows};
use crate::tensor::DType;

/// A matrix on the device and its bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matrix {
    /// Device address of its planes.
    pub at: DevicePtr<u8>,
    /// Element type.
    pub dtype: DType,
    /// Number of outputs.
    pub rows: u32,
    /// Number of inputs.
    pub cols: u32,
    /// f32 `[rows]`, or null.
    pub bias: DevicePtr<f32>,
}

/// Addresses of a part's weights.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    /// Addresses by operand number.
    pub operands: &'a [DevicePtr<u8>],
    /// Gate, up and down tables by number of the expert set.
    pub experts: &'a [Option<[ExpertTable; 3]>],
}

/// State that the units of a step share.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// The device to launch on.
    pub device: &'a Device,
    /// The stream that orders the launches.
    pub stream: &'a Stream,
    /// The bound program.
    pub bound: &'a Bound,
    /// Memory between kernels.
    pub scratch: &'a Scratch,
    /// Sizes of the step's arrays.
    pub layout: Layout,
    /// Addresses of the step's arrays.
    pub places: Places,
    /// Addresses of KV pages by page number, on the device.
    pub pages: DevicePtr<u64>,
    /// Splits of the row with most of them where they are cut by its position alone, by window number.
    pub splits: &'a [u32],
    /// No row sees more tokens: a power of two, so that steps are alike for long.
    pub tokens: u32,
    /// Addresses of the rotary tables, by number of the rotary embedding.
    pub angles: &'a [DevicePtr<f32>],
    /// Word that becomes 1 when a row chooses an expert that is not resident; null when the host looks itself.
    pub absent: DevicePtr<u32>,
}

impl Run<'_> {
    /// Launches `unit`. The step's arrays must be sent, and `weights` must hold the unit's operands.
    ///
    /// # Errors
    /// [`BackendError`] of a launch.
    pub fn launch(&self, unit: &Unit, weights: &Weights<'_>) -> Result<(), BackendError> {
        let rows = match unit.rows {
            Rows::All => self.layout.rows,
            Rows::Wanted => self.layout.logits,
        } as u32; // at most the rows the model was opened for, checked to fit
        if rows == 0 {
            return Ok(());
        }
        match &unit.work {
            Work::Embed(embed) => self.embed(embed, rows),
            Work::Take(take) => self.take(take, rows),
            Work::Norm(norm) => self.norm(norm, rows, weights),
            Work::Convert(convert) => self.convert_all(convert, rows),
            Work::Products(products) => self.side_by_side(products, rows, weights),
            Work::Heads(heads) => self.heads(heads, rows, weights),
            Work::ProjectHeads(heads) => self.project_heads(heads, rows, weights),
            Work::JoinHeads(heads) => self.join_heads(heads, rows),
            Work::Attend(attend) => self.attend(attend, rows, weights),
            Work::GatedProducts(gated) => self.gated_products(gated, rows, weights),
            Work::Gate(gate) => self.gate(gate, rows, &Terms::NONE),
            Work::Route(route) => self.route(route, rows, weights),
            Work::Experts(experts) => self.experts(experts, rows, weights),
            Work::Add(add) => self.add(add, rows),
            Work::Cap(cap) => self.cap(cap, rows),
            Work::Open(open) => self.open(open, rows),
            Work::Convolve(convolve) => self.convolve(convolve, rows, weights),
            Work::SelectiveScan(scan) => self.selective_scan(scan, weights),
            Work::DeltaRule(rule) => self.delta_rule(rule, weights),
            Work::Multiply(unit) => self.multiply(unit, rows, weights),
            Work::Rescale(unit) => self.rescale(unit, rows),
            Work::Sparsify(unit) => self.sparsify(unit, rows),
            Work::MixStreams(unit) => self.mix_streams(unit, rows),
            Work::AddToStreams(unit) => self.add_to_streams(unit, rows),
        }
    }

    /// Address of a plane.
    fn plane<T>(&self, plane: PlaneId) -> DevicePtr<T> {
        self.scratch.plane(plane).cast()
    }

    /// A view, from its first row on.
    fn at(&self, view: View) -> DevicePtr<f32> {
        self.plane(view.plane).offset(view.column as usize)
    }

    /// Splits to launch for a window where they are cut by position.
    fn splits(&self, window: usize) -> u32 {
        self.splits.get(window).copied().unwrap_or(1)
    }
}

impl Weights<'_> {
    fn vector(&self, operand: Operand) -> DevicePtr<f32> {
        // Units are launched only after their operands are resident.
        self.operands.get(operand.0 as usize).copied().unwrap_or(DevicePtr::NULL).cast()
    }

    fn optional(&self, operand: Option<Operand>) -> DevicePtr<f32> {
        operand.map_or(DevicePtr::NULL, |operand| self.vector(operand))
    }

    fn matrix(&self, product: &Product) -> Matrix {
        let Product { weight, bias, dtype, rows, cols } = *product;
        Matrix { at: self.vector(weight).cast(), dtype, rows, cols, bias: self.optional(bias) }
    }
}

/// Kernel number of an activation.
fn activation(activation: Activation) -> u32 {
    use crate::backend::hip::kernels::ops::{CLAMPED, GELU, LINEAR, SIGMOID, SILU, SQUARED_RELU};
    match activation {
        Activation::Silu => SILU,
        Activation::Gelu => GELU,
        Activation::Clamped => CLAMPED,
        Activation::Sigmoid => SIGMOID,
        Activation::Linear => LINEAR,
        Activation::SquaredRelu => SQUARED_RELU,
    }
}

/// A type passed the checks but has no kernel: a bug.
fn no_kernel(what: &str, dtype: DType) -> BackendError {
    BackendError::Internal(format!("there is no {what} kernel for {dtype}"))
}
