//! Prefill attention: many rows, in tiles of neighbouring rows of one sequence.

use super::Run;
use crate::backend::hip::kernels::heads::AttnAround;
use crate::backend::hip::kernels::ops::AttnPrefill;
use crate::backend::hip::kernels::thresholds::Order;
use crate::backend::hip::kernels::{Kernel, MatrixUnit};
use crate::backend::hip::step::Modes;
use crate::backend::hip::step::bind::Attend;
use crate::backend::hip::step::scratch::Scratch;
use crate::backend::hip::{Buffer, DevicePtr, Grid};
use crate::backend::{BackendError, KvType, StepBatch};

/// Queries of one KV head per tile.
pub const TILE_QUERIES: u32 = 64;

/// The same on the matrix unit across waves. Half as many tiles read keys and values.
const WIDE_TILE_QUERIES: u32 = 128;

/// Waves per workgroup, and on the matrix unit across waves.
const WAVES: u32 = 4;
const WIDE_WAVES: u32 = 8;

/// Workgroups of `attn_prefill` that a large device runs at a time: three on each of its units, and one across waves.
const BLOCKS: u32 = 384;
const WIDE_BLOCKS: u32 = 128;

/// Most workgroups that share a tile (`SHARES_MAX` of kernels/attention/prefill.h).
const SHARES_MAX: u32 = 32;

/// Bytes of LDS of a workgroup across waves: five steps of 64 tokens (`SLOTS` of kernels/attention/prefill_wide.h), and to the next
/// multiple of 1024.
const fn wide_lds(head_dim: u32) -> u32 {
    5 * 64 * 2 * head_dim * size_of::<u16>() as u32 + 1024
}

/// Decode splits, of 64 tokens at least, that make a workgroup's share worth its part of the join.
const SPLITS_OF_SHARE: u32 = 2;

/// Most queries of one KV head in a tile for attention with such heads. All attention of a program has the same tiles.
pub fn tile_queries(modes: Modes, head_dim: u32, around: bool) -> u32 {
    let is_wide = modes.unit.has(MatrixUnit::AcrossWaves) && modes.kv == KvType::F16 && !around;
    if is_wide && matches!(head_dim, 64 | 128) { WIDE_TILE_QUERIES } else { TILE_QUERIES }
}

/// Number of the first rows that are one of a sequence each, and the tiles of the others. Of each tile: first row and row count;
/// the slowest comes first. A tile has up to `queries` of one KV head, which at most `group` query heads share. No tiles, and all
/// rows alone, for group 0, for groups above `queries`, and if no tile would have two rows. With `around` no row is alone: only
/// tiles see windows that look both ways.
pub fn tiles(queries: u32, group: u32, batch: &StepBatch<'_>, around: bool) -> (usize, Vec<[u32; 2]>) {
    let rows_max = queries.checked_div(group).unwrap_or(0);
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

/// Workgroups that share each tile. `blocks`: tiles times KV heads. `at_once`: workgroups that the device runs at a time. `splits`:
/// those of decode attention for the longest row. `parts_max`: partial results that there is room for. A walk through all pages
/// alone would take most of a step with few tiles.
fn shares_of(blocks: u32, at_once: u32, splits: u32, parts_max: u32) -> u32 {
    let by_device = at_once.min(parts_max) / blocks.max(1);
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
        let is_wide = self.bound.tile_queries == WIDE_TILE_QUERIES;
        let kernel: Kernel<AttnPrefill> = match (kv, unit.head_dim) {
            (KvType::F16, 64) if is_wide => AttnPrefill::attn_prefill_wide_f16_64,
            (KvType::F16, 128) if is_wide => AttnPrefill::attn_prefill_wide_f16_128,
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
        let queries = self.bound.tile_queries;
        let room = |buffer: &Buffer, words: u32| buffer.len() / (4 * words) as usize;
        let parts = room(part_values, queries * unit.head_dim).min(room(part_stats, queries * 2));
        let room = parts.min(room(counters, 1)) as u32;
        let shares = match self.bound.modes.order {
            Order::ByRows => {
                let at_once = if is_wide { WIDE_BLOCKS } else { BLOCKS };
                shares_of(tiles * unit.kv.heads, at_once, self.splits(unit.windows_at), room)
            }
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
        let (waves, lds) = if is_wide { (WIDE_WAVES, wide_lds(unit.head_dim)) } else { (WAVES, 0) };
        let threads = waves * self.device.description().wave;
        let grid = Grid::xyz(unit.kv.heads, tiles, shares).threads(threads).lds(lds);
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
            falls: unit.falls.into(),
        };
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::ActivationType;

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
        assert_eq!(tiles(TILE_QUERIES, 16, &batch, false), (2, vec![[7, 2], [9, 1], [6, 1], [2, 4]]));
        assert_eq!(tiles(TILE_QUERIES, 64, &batch, false), (10, vec![]), "a tile would have one row");
        assert_eq!(tiles(128, 32, &batch, false), tiles(TILE_QUERIES, 16, &batch, false), "larger tiles");
        assert_eq!(tiles(TILE_QUERIES, 0, &batch, false), (10, vec![]));
        let (alone, all) = tiles(TILE_QUERIES, 16, &batch, true);
        assert_eq!((alone, all), (0, vec![[7, 2], [1, 1], [0, 1], [9, 1], [6, 1], [2, 4]]));
        let (alone, all) = tiles(TILE_QUERIES, 64, &batch, true);
        assert!(alone == 0 && all.len() == 10 && all.iter().all(|tile| tile[1] == 1), "{all:?}");
        assert_eq!(tiles(TILE_QUERIES, 65, &batch, true), (10, vec![]));
    }

    #[test]
    fn tiles_are_large_where_the_matrix_unit_across_waves_takes_them() {
        let of = |unit, kv, head_dim, around| {
            let modes = Modes { activations: ActivationType::Int8, kv, unit, order: Order::ByRows };
            tile_queries(modes, head_dim, around)
        };
        for unit in [MatrixUnit::AcrossWaves, MatrixUnit::AcrossWorkgroups] {
            assert_eq!([64, 128, 96, 256].map(|head| of(unit, KvType::F16, head, false)), [128, 128, 64, 64]);
            assert_eq!([KvType::Int8, KvType::F32].map(|kv| of(unit, kv, 128, false)), [64; 2]);
            assert_eq!(of(unit, KvType::F16, 128, true), 64, "windows both ways");
        }
        assert_eq!(
            [MatrixUnit::None, MatrixUnit::OfWave].map(|unit| of(unit, KvType::F16, 128, false)),
            [64; 2]
        );
    }

    #[test]
    fn few_tiles_are_shared_and_many_are_not() {
        let shares_of = |blocks, splits, room| shares_of(blocks, BLOCKS, splits, room);
        // 15 tiles of 8 KV heads at 4096 tokens (32 splits of 128), and 64 of them.
        assert_eq!([shares_of(15 * 8, 32, 512), shares_of(64 * 8, 32, 512)], [3, 1]);
        assert_eq!([shares_of(8, 32, 512), shares_of(8, 32, 40), shares_of(1, 128, 512)], [16, 5, 32]);
        assert_eq!([shares_of(8, 1, 512), shares_of(0, 0, 0)], [1, 1], "a short row");
    }
}
