//! A step of the fake device.

use crate::backend::{KV_PAGE_TOKENS, ModelSlot, StepBatch};

pub struct Step {
    pub slot: ModelSlot,
    /// It began beside a suspended one.
    pub beside: bool,
    pub tokens: Vec<u32>,
    pub positions: Vec<u32>,
    pub sequences: Vec<u32>,
    tables: Vec<u32>,
    stride: usize,
    pub logits: Vec<u32>,
    /// Parts run so far, to check their order.
    pub parts: Vec<u32>,
    /// Pauses of the current part so far.
    pub paused: u32,
}

impl Step {
    pub fn of(slot: ModelSlot, batch: &StepBatch<'_>, beside: bool) -> Self {
        Self {
            slot,
            beside,
            tokens: batch.token_ids.to_vec(),
            positions: batch.positions.to_vec(),
            sequences: batch.row_sequences.to_vec(),
            tables: batch.page_tables.to_vec(),
            stride: batch.page_table_stride,
            logits: batch.logits_rows.to_vec(),
            parts: Vec::new(),
            paused: 0,
        }
    }

    /// The page of a position of the row's sequence.
    pub fn page(&self, row: usize, position: u32) -> u32 {
        let sequence = self.sequences[row] as usize;
        self.tables[sequence * self.stride + position as usize / KV_PAGE_TOKENS]
    }
}
