//! Prefill attention: many rows, in tiles of neighbouring rows of one sequence.

use super::Run;
use crate::backend::hip::kernels::Kernel;
use crate::backend::hip::kernels::heads::AttnAround;
use crate::backend::hip::kernels::ops::AttnPrefill;
use crate::backend::hip::kernels::thresholds::Order;
use crate::backend::hip::step::bind::Attend;
use crate::backend::hip::step::scratch::Scratch;
use crate::backend::hip::{Buffer, DevicePtr, Grid};
use crate::backend::{BackendError, KvType, StepBatch};

/// Queries of one KV head per tile.
pub const TILE_QUERIES: u32 = 64;

/// Waves per workgroup.
const WAVES: u32 = 4;

/// Workgroups of `attn_prefill` that a large device runs at a time: three on each of its units.
const BLOCKS: u32 = 384;

/// Most workgroups that share a tile (`SHARES_MAX` of kernels/attention/prefill.h).
const SHARES_MAX: u32 = 32;

/// Decode splits, of 64 tokens at least, that make a workgroup's share worth its part of the join.
const SPLITS_OF_SHARE: u32 = 2;

/// Number of the first rows that are one of a sequence each, and the tiles of the others. Of each tile: first row and row count;
/// the slowest comes first. At most `group` query heads share a KV head. No tiles, and all rows alone, for group 0, for groups above
/// [`TILE_QUERIES`], and if no tile would have two rows. With `around` no row is alone: only tiles see windows that look both
/// ways.
pub fn tiles(group: u32, batch: &StepBatch<'_>, around: bool) -> (usize, Vec<[u32; 2]>) {
    let rows_max = TILE_QUERIES.checked_div(group).unwrap_or(0);
    let mut tiles: Vec<[u32; 2]> = Vec::new();
    if rows_max < 2 && !(around && rows_max == 1) {
        return (batch.positions.len(), tiles);
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
    let alone = tiles.iter().take_while(|[_, count]| *count == 1 && !around).count();
    tiles.drain(..alone);
    let end = |tile: &[u32; 2]| batch.positions.get((tile[0] + tile[1] - 1) as usize).copied();
    tiles.sort_by_key(|tile| std::cmp::Reverse(end(tile)));
    (alone, tiles)
}

/// Workgroups that share each tile. `blocks`: tiles times KV heads; `splits`: those of decode attention for the longest row;
/// `parts_max`: partial results that there is room for. A walk through all pages alone would take most of a step with few
/// tiles.
fn shares_of(blocks: u32, splits: u32, parts_max: u32) -> u32 {
    let by_device = BLOCKS.min(parts_max) / blocks.max(1);
    by_device.min(splits / SPLITS_OF_SHARE).clamp(1, SHARES_MAX)
}

impl Run<'_> {
    /// Attends to the step's tiles, and writes f16 rows if `halves`, else f32.
    pub(super) fn attend_in_tiles(
        &self,
        unit: &Attend,
        halves: bool,
        sinks: DevicePtr<f32>,
    ) -> Result<(), BackendError> {
        let kv = self.bound.modes.kv;
        let kernel: Kernel<AttnPrefill> = match (kv, unit.head_dim) {
            (KvType::F16, 64) => AttnPrefill::attn_prefill_f16_64,
            (KvType::F16, 80) => AttnPrefill::attn_prefill_f16_80,
            (KvType::F16, 96) => AttnPrefill::attn_prefill_f16_96,
            (KvType::F16, 128) => AttnPrefill::attn_prefill_f16_128,
            (KvType::F16, 256) => AttnPrefill::attn_prefill_f16_256,
            (KvType::F16, _) => AttnPrefill::attn_prefill_f16_any,
            (KvType::Int8, 64) => AttnPrefill::attn_prefill_i8_64,
            (KvType::Int8, 96) => AttnPrefill::attn_prefill_i8_96,
            (KvType::Int8, 128) => AttnPrefill::attn_prefill_i8_128,
            (KvType::Int8, 256) => AttnPrefill::attn_prefill_i8_256,
            (KvType::Int8, _) => AttnPrefill::attn_prefill_i8_any,
            (KvType::F32, _) => AttnPrefill::attn_prefill_f32_any,
        };
        let (out16, row_scales) = self.halves(&unit.out);
        let tiles = self.layout.tiles as u32;
        let Scratch { part_values, part_stats, counters, .. } = self.scratch;
        let room = |buffer: &Buffer, words: u32| buffer.len() / (4 * words) as usize;
        let parts = room(part_values, TILE_QUERIES * unit.head_dim).min(room(part_stats, TILE_QUERIES * 2));
        let room = parts.min(room(counters, 1)) as u32;
        let shares = match self.bound.modes.order {
            Order::ByRows => shares_of(tiles * unit.kv.heads, self.splits(unit.windows_at), room),
            // Windows that look both ways have tiles then too, and a share's end depends on other rows.
            Order::Fixed => 1,
        };
        let arguments = AttnPrefill {
            q: self.at(unit.queries),
            tiles: self.places.tiles,
            positions: self.ends_of_rows(unit),
            row_seq: self.places.sequences,
            page_tables: self.places.tables,
            page_base: self.pages,
            out: if halves { DevicePtr::NULL } else { self.floats(&unit.out) },
            out16: if halves { out16 } else { DevicePtr::NULL },
            row_scales,
            part_values: part_values.ptr(),
            part_stats: part_stats.ptr(),
            counters: counters.ptr(),
            sinks,
            layer_offset: unit.kv.offset,
            scale: unit.scale,
            cap: unit.cap,
            n_heads: unit.heads,
            n_kv_heads: unit.kv.heads,
            head_dim: unit.head_dim,
            table_stride: self.layout.stride as u32,
            window: unit.window,
        };
        let threads = WAVES * self.device.description().wave;
        let grid = Grid::xyz(unit.kv.heads, tiles, shares).threads(threads);
        if unit.is_around() {
            return self.attend_around(unit, grid, &arguments);
        }
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }
}

impl Run<'_> {
    /// Attends to tiles within a window that looks both ways. `of` has the arguments of other windows.
    fn attend_around(&self, unit: &Attend, grid: Grid, of: &AttnPrefill) -> Result<(), BackendError> {
        // Such programs have no pages of codes ([`KvType::within`]).
        let kernel: Kernel<AttnAround> = match (self.bound.modes.kv, unit.head_dim) {
            (KvType::F16 | KvType::Int8, 64) => AttnAround::attn_around_f16_64,
            (KvType::F16 | KvType::Int8, 256) => AttnAround::attn_around_f16_256,
            (KvType::F16 | KvType::Int8, _) => AttnAround::attn_around_f16_any,
            (KvType::F32, _) => AttnAround::attn_around_f32_any,
        };
        let arguments = AttnAround {
            q: of.q,
            tiles: of.tiles,
            positions: self.places.positions,
            ends: self.places.ends,
            row_seq: of.row_seq,
            page_tables: of.page_tables,
            page_base: of.page_base,
            out: of.out,
            out16: of.out16,
            row_scales: of.row_scales,
            part_values: of.part_values,
            part_stats: of.part_stats,
            counters: of.counters,
            sinks: of.sinks,
            layer_offset: of.layer_offset,
            scale: of.scale,
            cap: of.cap,
            n_heads: of.n_heads,
            n_kv_heads: of.n_kv_heads,
            head_dim: of.head_dim,
            table_stride: of.table_stride,
            window: of.window,
        };
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_alone_come_first_and_tiles_by_their_end() {
        let positions = [7, 30, 0, 1, 2, 3, 4, 90, 91, 5];
        let row_sequences = [0, 1, 2, 2, 2, 2, 2, 3, 3, 4];
        let batch = StepBatch {
            token_ids: &[0; 10],
            positions: &positions,
            row_sequences: &row_sequences,
            page_tables: &[0; 5],
            page_table_stride: 1,
            logits_rows: &[],
            recurrent: &[],
        };
        assert_eq!(tiles(16, &batch, false), (2, vec![[7, 2], [9, 1], [6, 1], [2, 4]]));
        assert_eq!(tiles(64, &batch, false), (10, vec![]), "a tile would have one row");
        assert_eq!(tiles(0, &batch, false), (10, vec![]));
        let (alone, all) = tiles(16, &batch, true);
        assert_eq!((alone, all), (0, vec![[7, 2], [1, 1], [0, 1], [9, 1], [6, 1], [2, 4]]));
        let (alone, all) = tiles(64, &batch, true);
        assert!(alone == 0 && all.len() == 10 && all.iter().all(|tile| tile[1] == 1), "{all:?}");
        assert_eq!(tiles(65, &batch, true), (10, vec![]));
    }

    #[test]
    fn few_tiles_are_shared_and_many_are_not() {
        // 15 tiles of 8 KV heads at 4096 tokens (32 splits of 128), and 64 of them.
        assert_eq!([shares_of(15 * 8, 32, 512), shares_of(64 * 8, 32, 512)], [3, 1]);
        assert_eq!([shares_of(8, 32, 512), shares_of(8, 32, 40), shares_of(1, 128, 512)], [16, 5, 32]);
        assert_eq!([shares_of(8, 1, 512), shares_of(0, 0, 0)], [1, 1], "a short row");
    }
}
