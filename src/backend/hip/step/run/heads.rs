//! Heads before attention: norms, rotation, and the store to KV pages. Products and joins of heads' parts.

use super::{Run, Weights, no_kernel};
use crate::backend::hip::kernels::heads as kernels;
use crate::backend::hip::kernels::matmul::{GemvHeads, choice};
use crate::backend::hip::kernels::ops::RopeKv;
use crate::backend::hip::step::bind::{Heads, JoinHeads, Kv, ProjectHeads, is_wide};
use crate::backend::hip::{DevicePtr, Grid};
use crate::backend::{BackendError, KvType};
use crate::program::RopeLayout;

/// Heads per workgroup of `rope_kv`.
const ROPE_HEADS: u32 = 8;

/// Heads before norm and rotation, and what these need.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    /// `f32[M][queries | keys | values]`.
    pub qkv: DevicePtr<f32>,
    /// `f32[head_dim]`, or null.
    pub q_norm: DevicePtr<f32>,
    /// `f32[head_dim]`, or null.
    pub k_norm: DevicePtr<f32>,
    /// The rotary table; null where heads do not turn.
    pub angles: DevicePtr<f32>,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Values of a head that rotate.
    pub rope_dims: u32,
    /// 1 pairs the two halves of a head, 0 pairs neighbours.
    pub pairs_by_halves: u32,
}

impl Source {
    /// No heads.
    pub const NONE: Self = Self {
        qkv: DevicePtr::NULL,
        q_norm: DevicePtr::NULL,
        k_norm: DevicePtr::NULL,
        angles: DevicePtr::NULL,
        eps: 0.0,
        rope_dims: 0,
        pairs_by_halves: 0,
    };
}

impl Run<'_> {
    /// Multiplies a part of each head with that head's matrix.
    pub(super) fn project_heads(
        &self,
        unit: &ProjectHeads,
        rows: u32,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let &ProjectHeads { from, heads, weight, dtype, outputs, out } = unit;
        let chosen = choice::heads_f32(dtype, rows).ok_or_else(|| no_kernel("gemv_heads", dtype))?;
        let arguments = GemvHeads {
            w: weights.vector(weight).cast(),
            n: outputs,
            cols: from.width,
            x: self.at(from.rows),
            x_stride: from.rows.stride,
            x_head: from.head_dim,
            rows,
            out: self.at(out),
            out_stride: out.stride,
        };
        let grid = choice::heads_grid(outputs, heads, rows, chosen.columns);
        Ok(self.device.launch(self.stream, chosen.kernel, grid, &arguments)?)
    }

    /// Joins two parts of each head.
    pub(super) fn join_heads(&self, unit: &JoinHeads, rows: u32) -> Result<(), BackendError> {
        let &JoinHeads { first, second, heads, out } = unit;
        let arguments = kernels::JoinHeads {
            first: self.at(first.rows),
            second: self.at(second.rows),
            out: self.at(out),
            first_stride: first.rows.stride,
            first_head: first.head_dim,
            first_width: first.width,
            second_stride: second.rows.stride,
            second_head: second.head_dim,
            second_width: second.width,
            heads,
        };
        let grid = Grid::xy((heads * (first.width + second.width)).div_ceil(1024), rows);
        Ok(self.device.launch(self.stream, kernels::JoinHeads::join_heads, grid, &arguments)?)
    }

    /// Where the heads of a unit come from.
    pub(super) fn source(&self, unit: &Heads, weights: &Weights<'_>) -> Source {
        let table = unit.rope.and_then(|turn| self.angles.get(turn.rope.0 as usize));
        let [q_norm, k_norm] = unit.norms.map(|norm| weights.optional(norm));
        Source {
            qkv: self.at(unit.from),
            q_norm,
            k_norm,
            angles: table.copied().unwrap_or(DevicePtr::NULL),
            eps: unit.eps,
            rope_dims: unit.rope.map_or(0, |turn| turn.dims),
            pairs_by_halves: u32::from(unit.rope.is_some_and(|turn| turn.layout == RopeLayout::Halves)),
        }
    }

    pub(super) fn heads(&self, unit: &Heads, rows: u32, weights: &Weights<'_>) -> Result<(), BackendError> {
        let kernel = match self.bound.modes.kv {
            KvType::F16 => RopeKv::rope_kv_f16,
            KvType::Int8 => RopeKv::rope_kv_i8,
            KvType::F32 => RopeKv::rope_kv_f32,
        };
        let kv = unit.kv.unwrap_or(Kv { offset: 0, heads: 0 });
        let (n_heads, q) = unit.queries.map_or((0, DevicePtr::NULL), |(heads, view)| (heads, self.at(view)));
        let source = self.source(unit, weights);
        if is_wide(unit.head_dim) {
            return self.wide_heads(unit, rows, (kv, n_heads, q), &source);
        }
        let Source { qkv, q_norm, k_norm, angles, eps, rope_dims, pairs_by_halves } = source;
        let arguments = RopeKv {
            qkv,
            q_norm,
            k_norm,
            angles,
            positions: self.places.positions,
            row_seq: self.places.sequences,
            page_tables: self.places.tables,
            page_base: self.pages,
            q,
            layer_offset: kv.offset,
            eps,
            n_heads,
            n_kv_heads: kv.heads,
            head_dim: unit.head_dim,
            rope_dims,
            halves: pairs_by_halves,
            table_stride: self.layout.stride as u32,
        };
        let grid = Grid::xy((n_heads + 2 * kv.heads).div_ceil(ROPE_HEADS), rows);
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }

    /// Rotates and stores heads that are wider than the usual kernel takes. They have no norms.
    fn wide_heads(
        &self,
        unit: &Heads,
        rows: u32,
        (kv, n_heads, q): (Kv, u32, DevicePtr<f32>),
        source: &Source,
    ) -> Result<(), BackendError> {
        let kernel = match self.bound.modes.kv {
            // Wide heads have no pages of codes ([`KvType::within`]).
            KvType::F16 | KvType::Int8 => kernels::RopeKvWide::rope_kv_wide_f16,
            KvType::F32 => kernels::RopeKvWide::rope_kv_wide_f32,
        };
        let arguments = kernels::RopeKvWide {
            qkv: source.qkv,
            angles: source.angles,
            positions: self.places.positions,
            row_seq: self.places.sequences,
            page_tables: self.places.tables,
            page_base: self.pages,
            q,
            layer_offset: kv.offset,
            n_heads,
            n_kv_heads: kv.heads,
            head_dim: unit.head_dim,
            rope_dims: source.rope_dims,
            halves: source.pairs_by_halves,
            table_stride: self.layout.stride as u32,
        };
        let grid = Grid::xy(n_heads + 2 * kv.heads, rows);
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }
}
