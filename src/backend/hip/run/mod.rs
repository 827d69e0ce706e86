//! The launches that each unit of a bound program is.

mod attention;
mod experts;
mod forms;
mod gate;
mod heads;
mod prefill;
mod product;
mod rows;

pub use attention::{attend_leaves_floats, splits_of};
pub use experts::ExpertTable;
pub use prefill::{TILE_QUERIES, tiles};

use super::arrays::{Layout, Places};
use super::scratch::Scratch;
use super::step::bind::{Bound, Operand, PlaneId, Product, Unit, View, Work};
use super::{Device, DevicePtr, Stream};
use crate::backend::BackendError;
use crate::program::{Activation, Rows};
use crate::tensor::DType;

/// A matrix on the device and its bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matrix {
    /// Its planes.
    pub at: DevicePtr<u8>,
    /// Element type.
    pub dtype: DType,
    /// Outputs.
    pub rows: u32,
    /// Inputs.
    pub cols: u32,
    /// f32 `[rows]`, or null.
    pub bias: DevicePtr<f32>,
}

/// Where a part's weights are.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    /// By number of the operand.
    pub operands: &'a [DevicePtr<u8>],
    /// Gates, ups and downs by number of the set of experts.
    pub experts: &'a [Option<[ExpertTable; 3]>],
}

/// What the units of a step have in common.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// Where they run.
    pub device: &'a Device,
    /// In which order.
    pub stream: &'a Stream,
    /// Of which program.
    pub bound: &'a Bound,
    /// Room between kernels.
    pub scratch: &'a Scratch,
    /// Sizes of the step's arrays.
    pub layout: Layout,
    /// Where these are.
    pub places: Places,
    /// Addresses of KV pages by number.
    pub pages: DevicePtr<u64>,
    /// Splits that decode attention launches for, by number of its window.
    pub splits: &'a [u32],
    /// Tables of rotary embeddings, by number.
    pub angles: &'a [DevicePtr<f32>],
}

impl Run<'_> {
    /// Launches what `unit` is. The step's arrays are sent, and the unit's operands are where `weights` says.
    ///
    /// # Errors
    /// [`BackendError`] of a launch.
    pub fn launch(&self, unit: &Unit, weights: &Weights<'_>) -> Result<(), BackendError> {
        let rows = match unit.rows {
            Rows::All => self.layout.rows,
            Rows::Wanted => self.layout.logits,
        } as u32; // at most what the model was opened for, which is checked to fit
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
            Work::Attend(attend) => self.attend(attend, rows),
            Work::GatedProducts(gated) => self.gated_products(gated, rows, weights),
            Work::Gate(gate) => self.gate(gate, rows),
            Work::Route(route) => self.route(route, rows),
            Work::Experts(experts) => self.experts(experts, rows, weights),
            Work::Add(add) => self.add(add, rows),
            Work::Cap(cap) => self.cap(cap, rows),
        }
    }

    /// Where a plane starts.
    fn plane<T>(&self, plane: PlaneId) -> DevicePtr<T> {
        self.scratch.plane(plane).cast()
    }

    /// Where rows start.
    fn at(&self, view: View) -> DevicePtr<f32> {
        offset(self.plane(view.plane), view.column as usize)
    }

    /// What attention launches for rows of a window.
    fn splits(&self, window: usize) -> u32 {
        self.splits.get(window).copied().unwrap_or(1)
    }
}

impl Weights<'_> {
    fn vector(&self, operand: Operand) -> DevicePtr<f32> {
        // Units are launched once their operands are there.
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

/// An activation's number to kernels.
fn activation(activation: Activation) -> u32 {
    use super::kernels::ops::{GELU, SILU};
    match activation {
        Activation::Silu => SILU,
        Activation::Gelu => GELU,
    }
}

/// A type that was let through without a kernel for it: a bug.
fn no_kernel(what: &str, dtype: DType) -> BackendError {
    BackendError::Internal(format!("no {what} kernel for {dtype}"))
}

/// The place `count` elements on.
fn offset<T>(at: DevicePtr<T>, count: usize) -> DevicePtr<T> {
    if at.is_null() { at } else { DevicePtr::at(at.address() + (count * size_of::<T>()) as u64) }
}
