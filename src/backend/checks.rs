//! The checks that every backend makes on a step's arrays.

use super::{BackendError, StepBatch, StepLimits};

impl StepBatch<'_> {
    /// Refuses arrays that contradict each other, the vocabulary's size or the model's limits. The backend itself
    /// checks which KV pages were written.
    ///
    /// # Errors
    /// [`BackendError::Batch`].
    pub fn check(&self, vocab: usize, limits: StepLimits) -> Result<(), BackendError> {
        let refuse = |why| Err(BackendError::Batch(why));
        let rows = self.token_ids.len();
        if rows == 0 || rows > limits.rows {
            return refuse("no rows, or more than the model was opened for");
        }
        if self.positions.len() != rows || self.row_sequences.len() != rows {
            return refuse("token ids, positions and sequences differ in number");
        }
        if self.token_ids.iter().any(|&id| id as usize >= vocab) {
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
        check_order(self)
    }
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
