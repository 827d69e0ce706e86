//! A step as a list of operations on addresses, and the launches that each of them is.
//!
//! Units become operations when they are called; an operation is launched once the next is known, because what reads a
//! result decides in which form it is written. A list that equals an earlier one can be replayed instead.

mod attention;
mod experts;
mod ffn;
mod forms;
mod prefill;
mod product;

pub use attention::splits_of;
pub use experts::ExpertMatrices;
pub use forms::Form;
pub use prefill::tiles;

use super::arrays::{Layout, Places};
use super::kernels::Kernel;
use super::kernels::ops::EmbedRows;
use super::scratch::Scratch;
use super::{Device, DevicePtr, Grid, Stream};
use crate::backend::{Activations, BackendError, KvType, ModelDims};
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

/// One unit with all addresses it reads weights from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    /// Sends the step's arrays and makes the residual of the embeddings among them.
    Begin {
        /// Type of the embedding table.
        dtype: DType,
    },
    /// Norm, projections, rotation, pages.
    AttentionInput {
        /// Which layer.
        layer: u32,
        /// Norm weights.
        norm: DevicePtr<f32>,
        /// Query, key and value matrices.
        parts: [Matrix; 3],
        /// Per-head norm of queries, or null.
        q_norm: DevicePtr<f32>,
        /// Per-head norm of keys, or null.
        k_norm: DevicePtr<f32>,
        /// Rotary table.
        angles: DevicePtr<f32>,
    },
    /// Attention of all rows.
    Attention {
        /// Which layer.
        layer: u32,
    },
    /// Output projection.
    AttentionOutput {
        /// Its matrix.
        matrix: Matrix,
    },
    /// Norm, gate and up.
    FfnInput {
        /// Norm weights.
        norm: DevicePtr<f32>,
        /// Gate matrix.
        gate: Matrix,
        /// Up matrix.
        up: Matrix,
    },
    /// Down projection.
    FfnOutput {
        /// Its matrix.
        matrix: Matrix,
    },
    /// Norm, router and choice of experts.
    Route {
        /// Norm weights.
        norm: DevicePtr<f32>,
        /// Its matrix.
        router: Matrix,
    },
    /// What the chosen experts add.
    Experts {
        /// Norm weights.
        norm: DevicePtr<f32>,
        /// Gate, up and down matrices.
        parts: [ExpertMatrices; 3],
    },
    /// Final norm and logits.
    Head {
        /// Norm weights.
        norm: DevicePtr<f32>,
        /// Output matrix.
        matrix: Matrix,
    },
}

/// What operations of one step have in common.
#[derive(Debug)]
pub struct Run<'a> {
    /// Where they run.
    pub device: &'a Device,
    /// In which order.
    pub stream: &'a Stream,
    /// The model's sizes.
    pub dims: &'a ModelDims,
    /// What quantised weights meet.
    pub activations: Activations,
    /// Element of KV pages.
    pub kv: KvType,
    /// Room between kernels.
    pub scratch: &'a Scratch,
    /// Sizes of the step's arrays.
    pub layout: Layout,
    /// Where these are.
    pub places: Places,
    /// Addresses of KV pages by number.
    pub pages: DevicePtr<u64>,
    /// Bytes from one layer of a page to the next.
    pub layer_bytes: u64,
    /// Splits that decode attention launches for.
    pub splits: u32,
}

impl Run<'_> {
    /// Launches `op`, whose result `next` reads. `Begin` expects the arrays to be sent.
    ///
    /// # Errors
    /// [`BackendError`] of a launch.
    pub fn launch(&self, op: &Op, next: Option<&Op>) -> Result<(), BackendError> {
        match op {
            Op::Begin { dtype } => self.embed(*dtype),
            Op::AttentionInput { layer, norm, parts, q_norm, k_norm, angles } => {
                self.attention_input(*layer, *norm, parts, [*q_norm, *k_norm], *angles)
            }
            Op::Attention { layer } => self.attention(*layer, self.wanted(next)),
            Op::AttentionOutput { matrix } => self.add_to_residual(&self.scratch.input, *matrix),
            Op::FfnInput { norm, gate, up } => self.ffn_input(*norm, *gate, *up, self.wanted(next)),
            Op::FfnOutput { matrix } => self.add_to_residual(&self.scratch.gated, *matrix),
            Op::Route { norm, router } => self.route(*norm, *router),
            Op::Experts { norm, parts: [gate, up, down] } => self.experts(*norm, *gate, *up, *down),
            Op::Head { norm, matrix } => self.head(*norm, *matrix),
        }
    }

    /// In which form the next operation reads its input.
    fn wanted(&self, next: Option<&Op>) -> Form {
        match next {
            Some(Op::AttentionOutput { matrix } | Op::FfnOutput { matrix }) => {
                self.form_for(*matrix, self.rows())
            }
            _ => Form::Float,
        }
    }

    fn rows(&self) -> u32 {
        self.layout.rows as u32 // at most rows_max, which is checked to fit
    }

    fn embed(&self, dtype: DType) -> Result<(), BackendError> {
        let kernel = embed_kernel(dtype).ok_or_else(|| no_kernel("embed_rows", dtype))?;
        let cols = self.dims.hidden as u32;
        let arguments = EmbedRows {
            bytes: self.places.embeddings,
            x: self.scratch.residual.ptr(),
            row_bytes: self.layout.embedding_bytes as u64,
            cols,
        };
        let grid = Grid::xy(cols.div_ceil(256), self.rows());
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }

    fn head(&self, norm: DevicePtr<f32>, matrix: Matrix) -> Result<(), BackendError> {
        let rows = self.layout.logits as u32;
        if rows == 0 {
            return Ok(());
        }
        let (input, form) = (&self.scratch.input, self.form_for(matrix, rows));
        self.norm(norm, self.places.logits_rows, rows, input, form)?;
        let out = self.scratch.logits.ptr();
        self.products(&[matrix], input, rows, out, self.dims.vocab as u32, false)
    }
}

/// Reads embedding rows of a type as the file has them.
pub fn embed_kernel(dtype: DType) -> Option<Kernel<EmbedRows>> {
    Some(match dtype {
        DType::F32 => EmbedRows::embed_rows_f32,
        DType::F16 => EmbedRows::embed_rows_f16,
        DType::BF16 => EmbedRows::embed_rows_bf16,
        DType::Q8_0 => EmbedRows::embed_rows_q8_0,
        DType::Q4_0 => EmbedRows::embed_rows_q4_0,
        DType::Q4_1 => EmbedRows::embed_rows_q4_1,
        DType::Q5_0 => EmbedRows::embed_rows_q5_0,
        DType::Q5_1 => EmbedRows::embed_rows_q5_1,
        DType::Q4_K => EmbedRows::embed_rows_q4_k,
        DType::Q5_K => EmbedRows::embed_rows_q5_k,
        DType::Q6_K => EmbedRows::embed_rows_q6_k,
        DType::MXFP4 => EmbedRows::embed_rows_mxfp4,
        _ => return None,
    })
}

/// A type that was let through without a kernel for it: a bug.
fn no_kernel(what: &str, dtype: DType) -> BackendError {
    BackendError::Internal(format!("no {what} kernel for {dtype}"))
}

/// The place `count` elements on.
fn offset<T>(at: DevicePtr<T>, count: usize) -> DevicePtr<T> {
    if at.is_null() { at } else { DevicePtr::at(at.address() + (count * size_of::<T>()) as u64) }
}
