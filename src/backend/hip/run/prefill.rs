//! Attention of many rows, in tiles of neighbouring rows of one sequence.

use super::super::kernels::Kernel;
use super::super::kernels::ops::AttnPrefill;
use super::super::{DevicePtr, Grid};
use super::{Form, Run};
use crate::backend::{BackendError, KvType, ModelDims, StepBatch};

/// Queries of one KV head that a tile holds.
const TILE_QUERIES: usize = 64;

/// Waves of a block.
const WAVES: u32 = 4;

/// The tiles of a step, first row and number of rows of each, those that take longest first. Empty where query heads share
/// a KV head in larger numbers than a tile holds.
pub fn tiles(dims: &ModelDims, batch: &StepBatch<'_>) -> Vec<[u32; 2]> {
    let rows_max = TILE_QUERIES / (dims.n_heads / dims.n_kv_heads).max(1);
    let mut tiles: Vec<[u32; 2]> = Vec::new();
    if rows_max == 0 {
        return tiles;
    }
    let rows = batch.positions.iter().zip(batch.row_sequences);
    let mut before = None;
    for (row, (&position, &sequence)) in (0u32..).zip(rows) {
        let follows = before == Some((position.wrapping_sub(1), sequence));
        before = Some((position, sequence));
        match tiles.last_mut() {
            Some([_, count]) if follows && (*count as usize) < rows_max => *count += 1,
            _ => tiles.push([row, 1]),
        }
    }
    let end = |tile: &[u32; 2]| batch.positions.get((tile[0] + tile[1] - 1) as usize).copied();
    tiles.sort_by_key(|tile| std::cmp::Reverse(end(tile)));
    tiles
}

impl Run<'_> {
    /// Of scores in units of log2.
    pub(super) fn attention_scale(&self) -> f32 {
        std::f32::consts::LOG2_E / (self.dims.head_dim as f32).sqrt()
    }

    pub(super) fn attention_in_tiles(&self, layer: u32, form: Form) -> Result<(), BackendError> {
        let (dims, scratch) = (self.dims, self.scratch);
        let kernel: Kernel<AttnPrefill> = match (self.kv, dims.head_dim) {
            (KvType::F16, 64) => AttnPrefill::attn_prefill_f16_64,
            (KvType::F16, 80) => AttnPrefill::attn_prefill_f16_80,
            (KvType::F16, 96) => AttnPrefill::attn_prefill_f16_96,
            (KvType::F16, 128) => AttnPrefill::attn_prefill_f16_128,
            (KvType::F16, _) => AttnPrefill::attn_prefill_f16_any,
            (KvType::F32, _) => AttnPrefill::attn_prefill_f32_any,
        };
        // A mean of f16 values is in f16's range; one of f32 values may not be.
        let direct = form == Form::Half && self.kv == KvType::F16;
        let (halves, row_scales) = scratch.input.halves();
        let out = match form {
            Form::Half if direct => DevicePtr::NULL,
            Form::Float => scratch.input.values(),
            Form::A8 | Form::Half => scratch.attended.ptr(),
        };
        let arguments = AttnPrefill {
            q: scratch.queries.ptr(),
            tiles: self.places.tiles,
            positions: self.places.positions,
            row_seq: self.places.sequences,
            page_tables: self.places.tables,
            page_base: self.pages,
            out,
            out16: if direct { halves } else { DevicePtr::NULL },
            row_scales,
            layer_offset: u64::from(layer) * self.layer_bytes,
            scale: self.attention_scale(),
            n_heads: dims.n_heads as u32,
            n_kv_heads: dims.n_kv_heads as u32,
            head_dim: dims.head_dim as u32,
            table_stride: self.layout.stride as u32,
        };
        let threads = WAVES * self.device.description().wave;
        let grid = Grid::xy(dims.n_kv_heads as u32, self.layout.tiles as u32).threads(threads);
        self.device.launch(self.stream, kernel, grid, &arguments)?;
        if direct || form == Form::Float {
            return Ok(());
        }
        self.convert(out, (dims.n_heads * dims.head_dim) as u32, &scratch.input, form)
    }
}
