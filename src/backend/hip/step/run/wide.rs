//! Attention of heads that are wider than other kernels take: of few rows and of many.

use super::{Run, Weights};
use crate::backend::hip::Grid;
use crate::backend::hip::kernels::heads::{AttnWide, WIDE_HEADS};
use crate::backend::hip::kernels::thresholds::LAUNCH_ROWS_MAX;
use crate::backend::hip::step::bind::{Attend, Form};
use crate::backend::{BackendError, KvType};

impl Run<'_> {
    /// Attends with wide heads, with the result in `form`. Rows of several splits are launched as many at a time as there is
    /// room for their partial results.
    pub(super) fn attend_wide(
        &self,
        unit: &Attend,
        rows: u32,
        form: Form,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let kernel = match self.bound.modes.kv {
            // Wide heads have no pages of codes ([`KvType::within`]).
            KvType::F16 | KvType::Int8 => AttnWide::attn_wide_f16,
            KvType::F32 => AttnWide::attn_wide_f32,
        };
        let cols = (unit.heads * unit.head_dim) as usize;
        let blocks = unit.kv.heads * (unit.heads / unit.kv.heads.max(1)).div_ceil(WIDE_HEADS);
        let splits = self.splits(unit.windows_at).max(1);
        let together = self.rows_together(unit, splits, blocks)?;
        let (q, out) = (self.at(unit.queries), self.floats(&unit.out));
        let positions = self.ends_of_rows(unit);
        let (part_values, part_stats) = (&self.scratch.part_values, &self.scratch.part_stats);
        for first in (0..rows as usize).step_by(together) {
            let count = (rows as usize - first).min(together) as u32; // at most the launch's rows
            let arguments = AttnWide {
                q: q.offset(first * cols),
                positions: positions.offset(first),
                row_seq: self.places.sequences.offset(first),
                page_tables: self.places.tables,
                page_base: self.pages,
                part_values: part_values.ptr(),
                part_stats: part_stats.ptr(),
                counters: self.scratch.counters.ptr(),
                out: out.offset(first * cols),
                sinks: weights.optional(unit.sinks),
                layer_offset: unit.kv.offset,
                scale: unit.scale,
                cap: unit.cap,
                n_heads: unit.heads,
                n_kv_heads: unit.kv.heads,
                head_dim: unit.head_dim,
                table_stride: self.layout.stride as u32,
                window: unit.window,
            };
            let grid = Grid::xyz(blocks, splits, count);
            self.device.launch(self.stream, kernel, grid, &arguments)?;
        }
        match unit.out.float {
            Some(view) if form != Form::Float => {
                self.convert(view, unit.heads * unit.head_dim, rows, &unit.out, form)
            }
            _ => Ok(()),
        }
    }

    /// Rows of a launch with so many splits of each, and so many workgroups of a split.
    fn rows_together(&self, unit: &Attend, splits: u32, blocks: u32) -> Result<usize, BackendError> {
        if splits == 1 {
            return Ok(LAUNCH_ROWS_MAX);
        }
        let parts = unit.heads as usize * splits as usize;
        let values = self.scratch.part_values.len() / (4 * parts * unit.head_dim as usize).max(1);
        let stats = self.scratch.part_stats.len() / (8 * parts).max(1);
        let counted = self.scratch.counters.len() / (4 * blocks as usize).max(1);
        match values.min(stats).min(counted).min(LAUNCH_ROWS_MAX) {
            0 => Err(BackendError::Internal("there is no room for the parts of wide heads".to_owned())),
            rows => Ok(rows),
        }
    }
}
