//! The checks that every backend makes on a step's arrays.

use std::collections::BTreeSet;

use super::{BackendError, StepBatch, StepLimits};
use crate::program::Program;

impl StepBatch<'_> {
    /// Refuses arrays that contradict each other, the vocabulary's size or the model's limits. The backend itself
    /// checks which KV pages were written.
    ///
    /// # Errors
    /// [`BackendError::Batch`].
    pub fn check(&self, program: &Program, limits: StepLimits) -> Result<(), BackendError> {
        let refuse = |why| Err(BackendError::Batch(why));
        let rows = self.token_ids.len();
        if rows == 0 || rows > limits.rows {
            return refuse("no rows, or more than the model was opened for");
        }
        if self.positions.len() != rows || self.row_sequences.len() != rows {
            return refuse("token ids, positions and sequences differ in number");
        }
        if self.token_ids.iter().any(|&id| id as usize >= program.vocab()) {
            return refuse("a token id outside the vocabulary");
        }
        if self.page_table_stride == 0 || !self.page_tables.len().is_multiple_of(self.page_table_stride) {
            return refuse("the page tables are no multiple of their stride");
        }
        let sequences = self.page_tables.len() / self.page_table_stride;
        if self.row_sequences.iter().any(|&s| s as usize >= sequences) {
            return refuse("a row's sequence has no page table");
        }
        if self.logits_rows.len() > limits.wanted_rows {
            return refuse("more rows ask for logits than the model was opened for");
        }
        if self.logits_rows.iter().any(|&r| r as usize >= rows) {
            return refuse("logits are asked of a row outside the step");
        }
        if !self.logits_rows.is_sorted_by(|a, b| a < b) {
            return refuse("the rows that ask for logits do not rise");
        }
        check_order(self)?;
        if program.is_recurrent() { check_recurrent(self, sequences) } else { Ok(()) }
    }
}

/// Rows of a sequence are adjacent, as each needs what the row before it left. States are read and written apart.
fn check_recurrent(batch: &StepBatch<'_>, sequences: usize) -> Result<(), BackendError> {
    let refuse = |why| Err(BackendError::Batch(why));
    if batch.recurrent.len() != sequences {
        return refuse("a sequence has no place for its recurrent states");
    }
    let runs = batch.row_sequences.chunk_by(|a, b| a == b);
    let seen: BTreeSet<u32> = runs.clone().filter_map(|run| run.first().copied()).collect();
    if seen.len() != runs.count() {
        return refuse("rows of a sequence with recurrent states are not adjacent");
    }
    let before: BTreeSet<u32> = batch.recurrent.iter().filter_map(|place| place.before).collect();
    let after: BTreeSet<u32> = batch.recurrent.iter().map(|place| place.after).collect();
    if after.len() != sequences || !before.is_disjoint(&after) {
        return refuse("a place of recurrent states is written twice, or also read");
    }
    let mut rows = batch.row_sequences.iter().zip(batch.positions);
    let starts = |sequence: &u32, position: &u32| {
        let first = batch.recurrent.get(*sequence as usize).is_some_and(|place| place.before.is_none());
        first == (*position == 0)
    };
    let mut last = None;
    if rows
        .any(|(sequence, position)| last.replace(*sequence) != Some(*sequence) && !starts(sequence, position))
    {
        return refuse("a sequence's recurrent states begin at another position than 0");
    }
    Ok(())
}

/// Positions of a sequence rise from row to row. A sequence's rows need not be adjacent.
fn check_order(batch: &StepBatch<'_>) -> Result<(), BackendError> {
    let mut order: Vec<usize> = (0..batch.row_sequences.len()).collect();
    order.sort_by_key(|&row| batch.row_sequences[row]); // stable: rows of a sequence keep their order
    let falls = |w: &[usize]| {
        batch.row_sequences[w[0]] == batch.row_sequences[w[1]]
            && batch.positions[w[0]] >= batch.positions[w[1]]
    };
    if order.windows(2).any(falls) {
        return Err(BackendError::Batch("the positions of a sequence do not rise"));
    }
    Ok(())
}
