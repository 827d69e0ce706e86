//! Prefill attention: many rows, in tiles of neighbouring rows of one sequence.

use super::Run;
use super::attention::tiles_write_halves;
use crate::backend::hip::kernels::Kernel;
use crate::backend::hip::kernels::ops::AttnPrefill;
use crate::backend::hip::step::bind::{Attend, Form};
use crate::backend::hip::{DevicePtr, Grid};
use crate::backend::{BackendError, KvType, StepBatch};

/// Queries of one KV head per tile.
pub const TILE_QUERIES: u32 = 64;

/// Waves per workgroup.
const WAVES: u32 = 4;

/// The tiles of a step: first row and row count of each, slowest first. At most `group` query heads share a KV head.
/// Empty for group 0 and for groups above [`TILE_QUERIES`].
pub fn tiles(group: u32, batch: &StepBatch<'_>) -> Vec<[u32; 2]> {
    let rows_max = TILE_QUERIES.checked_div(group).unwrap_or(0);
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
            Some([_, count]) if follows && *count < rows_max => *count += 1,
            _ => tiles.push([row, 1]),
        }
    }
    let end = |tile: &[u32; 2]| batch.positions.get((tile[0] + tile[1] - 1) as usize).copied();
    tiles.sort_by_key(|tile| std::cmp::Reverse(end(tile)));
    tiles
}

impl Run<'_> {
    pub(super) fn attend_in_tiles(&self, unit: &Attend, rows: u32, form: Form) -> Result<(), BackendError> {
        let kv = self.bound.modes.kv;
        let kernel: Kernel<AttnPrefill> = match (kv, unit.head_dim) {
            (KvType::F16, 64) => AttnPrefill::attn_prefill_f16_64,
            (KvType::F16, 80) => AttnPrefill::attn_prefill_f16_80,
            (KvType::F16, 96) => AttnPrefill::attn_prefill_f16_96,
            (KvType::F16, 128) => AttnPrefill::attn_prefill_f16_128,
            (KvType::F16, _) => AttnPrefill::attn_prefill_f16_any,
            (KvType::F32, _) => AttnPrefill::attn_prefill_f32_any,
        };
        let direct = form == Form::Half && tiles_write_halves(self.bound.modes);
        let (halves, row_scales) = self.halves(&unit.out);
        let arguments = AttnPrefill {
            q: self.at(unit.queries),
            tiles: self.places.tiles,
            positions: self.places.positions,
            row_seq: self.places.sequences,
            page_tables: self.places.tables,
            page_base: self.pages,
            out: if direct { DevicePtr::NULL } else { self.floats(&unit.out) },
            out16: if direct { halves } else { DevicePtr::NULL },
            row_scales,
            layer_offset: unit.kv.offset,
            scale: unit.scale,
            n_heads: unit.heads,
            n_kv_heads: unit.kv.heads,
            head_dim: unit.head_dim,
            table_stride: self.layout.stride as u32,
            window: unit.window,
        };
        let threads = WAVES * self.device.description().wave;
        let grid = Grid::xy(unit.kv.heads, self.layout.tiles as u32).threads(threads);
        self.device.launch(self.stream, kernel, grid, &arguments)?;
        match unit.out.float {
            Some(view) if !direct => self.convert(view, unit.heads * unit.head_dim, rows, &unit.out, form),
            _ => Ok(()),
        }
    }
}
