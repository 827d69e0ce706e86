//! One open model: its sizes, KV pages and the rows of a step between units.

use super::activations::ActivationBuffer;
use super::attention::Partials;
use super::experts::ExpertRows;
use super::kv::{KvGeometry, KvPool};
use super::rope::RopeTable;
use super::scratch::Plane;
use super::step::Step;
use crate::backend::{BackendError, KvType, ModelDims};
use crate::tensor::LazyTensor;

/// A model's room on this backend.
pub struct Model {
    /// Sizes.
    pub dims: ModelDims,
    /// KV pages.
    pub kv: KvPool,
    /// The batch at hand.
    pub step: Step,
    /// Rotary angles of the step's rows, and whose factors they were made with.
    pub rope: RopeTable,
    /// `None` until the step's first layer has filled `rope`.
    pub rope_made_with: Option<Option<LazyTensor>>,
    /// Input of the next product.
    pub acts: ActivationBuffer,
    /// Residual stream, `[rows_max][hidden]`.
    pub residual: Plane,
    /// Queries, keys and values, `[rows_max][(n_heads + 2 n_kv_heads) * head_dim]`.
    pub qkv: Plane,
    /// Attention's result, `[rows_max][n_heads * head_dim]`.
    pub attended: Plane,
    /// `silu(gate) * up`, `[rows_max][ffn]`; a layer may use fewer columns, then its rows stand closer.
    pub gated: Plane,
    /// Columns of `gated` in use.
    pub gated_cols: usize,
    /// What layers of experts work on, where the model has any.
    pub experts: Option<ExpertRows>,
    /// `[logits_rows_max][vocab]`.
    pub logits: Plane,
    /// Whether `logits` are those of the step at hand.
    pub has_logits: bool,
    /// Attention's results by split.
    pub partials: Partials,
    /// A norm's weight as f32.
    pub norm: Vec<f32>,
    /// Per-head norm weights as f32.
    pub head_norms: [Vec<f32>; 2],
}

impl Model {
    /// Room for a model of sizes `dims`, with an empty pool of `pages` KV pages.
    ///
    /// # Errors
    /// [`BackendError::Dims`], [`BackendError::OutOfMemory`].
    pub fn open(dims: &ModelDims, kv: KvType, pages: u32) -> Result<Self, BackendError> {
        dims.check()?;
        let geometry =
            KvGeometry::of(dims, kv).ok_or(BackendError::Dims("a KV page exceeds the address space"))?;
        let heads = |n: usize| n.checked_mul(dims.head_dim).ok_or(BackendError::Dims("heads are too many"));
        let rows = dims.rows_max;
        let (q, kv_cols) = (heads(dims.n_heads)?, heads(dims.n_kv_heads)?);
        Ok(Self {
            kv: KvPool::new(geometry, kv, pages),
            step: Step::default(),
            rope: RopeTable::default(),
            rope_made_with: None,
            acts: ActivationBuffer::new(),
            residual: Plane::new("the residual stream", rows, dims.hidden)?,
            qkv: Plane::new("queries, keys and values", rows, q.saturating_add(kv_cols.saturating_mul(2)))?,
            attended: Plane::new("attention results", rows, q)?,
            gated: Plane::new("the feed-forward layer", rows, dims.ffn)?,
            gated_cols: dims.ffn,
            experts: dims.experts.as_ref().map(|e| ExpertRows::new(e, rows, dims.hidden)).transpose()?,
            logits: Plane::new("logits", dims.logits_rows_max, dims.vocab)?,
            has_logits: false,
            partials: Partials::default(),
            norm: Vec::new(),
            head_norms: [Vec::new(), Vec::new()],
            dims: dims.clone(),
        })
    }

    /// Fills what the step at hand will write with NaN, so that a unit that reads what none has written shows.
    pub fn poison(&mut self) {
        let rows = self.step.rows();
        for plane in [&mut self.residual, &mut self.qkv, &mut self.attended, &mut self.gated] {
            let cols = plane.cols();
            plane.values_mut()[..rows * cols].fill(f32::NAN);
        }
        if let Some(experts) = &mut self.experts {
            experts.poison(rows);
        }
        (0..self.step.logits_rows.len()).for_each(|row| self.logits.row_mut(row).fill(f32::NAN));
    }

    /// Values of a row's queries, and of its keys (or values).
    pub fn head_cols(&self) -> (usize, usize) {
        (self.dims.n_heads * self.dims.head_dim, self.dims.n_kv_heads * self.dims.head_dim)
    }
}
