//! Heads before attention: norms, rotation, and the store to KV pages.

use super::{Run, Weights};
use crate::backend::hip::kernels::ops::RopeKv;
use crate::backend::hip::step::bind::{Heads, Kv};
use crate::backend::hip::{DevicePtr, Grid};
use crate::backend::{BackendError, KvType};
use crate::program::RopeLayout;

/// Heads per workgroup of `rope_kv`.
const ROPE_HEADS: u32 = 8;

impl Run<'_> {
    pub(super) fn heads(&self, unit: &Heads, rows: u32, weights: &Weights<'_>) -> Result<(), BackendError> {
        let kernel = match self.bound.modes.kv {
            KvType::F16 => RopeKv::rope_kv_f16,
            KvType::F32 => RopeKv::rope_kv_f32,
        };
        let kv = unit.kv.unwrap_or(Kv { offset: 0, heads: 0 });
        let (n_heads, q) = unit.queries.map_or((0, DevicePtr::NULL), |(heads, view)| (heads, self.at(view)));
        let table = unit.rope.and_then(|turn| self.angles.get(turn.rope.0 as usize));
        let [q_norm, k_norm] = unit.norms.map(|norm| weights.optional(norm));
        let arguments = RopeKv {
            qkv: self.at(unit.from),
            q_norm,
            k_norm,
            angles: table.copied().unwrap_or(DevicePtr::NULL),
            positions: self.places.positions,
            row_seq: self.places.sequences,
            page_tables: self.places.tables,
            page_base: self.pages,
            q,
            layer_offset: kv.offset,
            eps: unit.eps,
            n_heads,
            n_kv_heads: kv.heads,
            head_dim: unit.head_dim,
            rope_dims: unit.rope.map_or(0, |turn| turn.dims),
            halves: u32::from(unit.rope.is_some_and(|turn| turn.layout == RopeLayout::Halves)),
            table_stride: self.layout.stride as u32,
        };
        let grid = Grid::xy((n_heads + 2 * kv.heads).div_ceil(ROPE_HEADS), rows);
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }
}
