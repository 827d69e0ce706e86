//! Row operations: embeddings, gathering the rows with logits, sums, caps, gates of whole rows.

use super::{Run, no_kernel};
use crate::backend::BackendError;
use crate::backend::hip::Grid;
use crate::backend::hip::kernels::matmul::choice;
use crate::backend::hip::kernels::ops::{AddRows, CapRows, EmbedRows, OpenRows, TakeRows};
use crate::backend::hip::step::bind::{Add, Cap, Embed, Open, Take};

impl Run<'_> {
    pub(super) fn embed(&self, embed: &Embed, rows: u32) -> Result<(), BackendError> {
        let Embed { dtype, cols, scale, first, out } = *embed;
        let kernel = choice::embed(dtype).ok_or_else(|| no_kernel("embed_rows", dtype))?;
        let arguments = EmbedRows {
            bytes: self.places.embeddings.offset(first as usize),
            x: self.at(out),
            row_bytes: self.layout.embedding_bytes as u64,
            cols,
            scale,
        };
        let grid = Grid::xy(cols.div_ceil(256), rows);
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }

    pub(super) fn take(&self, take: &Take, rows: u32) -> Result<(), BackendError> {
        let Take { from, out, cols } = *take;
        let arguments = TakeRows {
            x: self.at(from),
            rows: self.places.logits_rows,
            out: self.at(out),
            x_stride: from.stride,
            cols,
        };
        let grid = Grid::xy(cols.div_ceil(1024), rows);
        Ok(self.device.launch(self.stream, TakeRows::take_rows, grid, &arguments)?)
    }

    pub(super) fn add(&self, add: &Add, rows: u32) -> Result<(), BackendError> {
        let Add { from, out, scale, keep, cols } = *add;
        let arguments = AddRows {
            x: self.at(from),
            out: self.at(out),
            scale,
            keep: u32::from(keep),
            x_stride: from.stride,
            out_stride: out.stride,
            cols,
        };
        let grid = Grid::xy(cols.div_ceil(1024), rows);
        Ok(self.device.launch(self.stream, AddRows::add_rows, grid, &arguments)?)
    }

    pub(super) fn open(&self, open: &Open, rows: u32) -> Result<(), BackendError> {
        let Open { gate, rows: values, cols } = *open;
        let arguments = OpenRows {
            gate: self.at(gate),
            x: self.at(values),
            gate_stride: gate.stride,
            stride: values.stride,
            cols,
        };
        let grid = Grid::xy(cols.div_ceil(1024), rows);
        Ok(self.device.launch(self.stream, OpenRows::open_rows, grid, &arguments)?)
    }

    pub(super) fn cap(&self, cap: &Cap, rows: u32) -> Result<(), BackendError> {
        let Cap { rows: values, cap, cols } = *cap;
        let arguments = CapRows { x: self.at(values), cap, stride: values.stride, cols };
        let grid = Grid::xy(cols.div_ceil(1024), rows);
        Ok(self.device.launch(self.stream, CapRows::cap_rows, grid, &arguments)?)
    }
}
