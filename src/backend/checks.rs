//! What every backend asks of a model's sizes, a step's arrays and a unit's weights.

use super::{BackendError, DeviceTensor, ModelDims, Projection, StepBatch};

impl StepBatch<'_> {
    /// Refuses arrays that contradict each other or the model. Which pages were written is the backend's to check.
    ///
    /// # Errors
    /// [`BackendError::Batch`].
    pub fn check(&self, dims: &ModelDims) -> Result<(), BackendError> {
        let refuse = |why| Err(BackendError::Batch(why));
        let rows = self.token_ids.len();
        if rows == 0 || rows > dims.rows_max {
            return refuse("no rows, or more than the model was opened for");
        }
        if self.positions.len() != rows || self.row_sequences.len() != rows {
            return refuse("token ids, positions and sequences differ in number");
        }
        if self.token_ids.iter().any(|&id| id as usize >= dims.vocab) {
            return refuse("a token id outside the vocabulary");
        }
        if self.page_table_stride == 0 || !self.page_tables.len().is_multiple_of(self.page_table_stride) {
            return refuse("page tables are not whole");
        }
        let sequences = self.page_tables.len() / self.page_table_stride;
        if self.row_sequences.iter().any(|&s| s as usize >= sequences) {
            return refuse("a row of a sequence without page table");
        }
        if self.logits_rows.len() > dims.logits_rows_max {
            return refuse("more rows with logits than the model was opened for");
        }
        if self.logits_rows.iter().any(|&r| r as usize >= rows) {
            return refuse("logits of a row that the step does not have");
        }
        if !self.logits_rows.is_sorted_by(|a, b| a < b) {
            return refuse("rows with logits do not rise");
        }
        check_order(self)
    }
}

/// Positions of a sequence rise from row to row. A sequence's rows need not stand together.
fn check_order(batch: &StepBatch<'_>) -> Result<(), BackendError> {
    let mut order: Vec<usize> = (0..batch.row_sequences.len()).collect();
    order.sort_by_key(|&row| batch.row_sequences[row]); // stable: rows of a sequence keep their order
    let falls = |w: &[usize]| {
        batch.row_sequences[w[0]] == batch.row_sequences[w[1]]
            && batch.positions[w[0]] >= batch.positions[w[1]]
    };
    if order.windows(2).any(falls) {
        return Err(BackendError::Batch("positions of a sequence do not rise"));
    }
    Ok(())
}

impl ModelDims {
    /// Refuses sizes that contradict each other.
    ///
    /// # Errors
    /// [`BackendError::Dims`].
    pub fn check(&self) -> Result<(), BackendError> {
        let ffn = self.experts.as_ref().map_or(self.ffn, |e| e.ffn.min(e.count));
        let sizes =
            [self.hidden, self.n_layers, self.n_heads, self.n_kv_heads, self.head_dim, ffn, self.vocab];
        if sizes.contains(&0) || self.rows_max == 0 {
            return Err(BackendError::Dims("a size is 0"));
        }
        if self.experts.as_ref().is_some_and(|e| e.used == 0 || e.used > e.count) {
            return Err(BackendError::Dims("a row uses no expert, or more than there are"));
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(BackendError::Dims("KV heads do not divide the query heads"));
        }
        if !self.rope.dims.is_multiple_of(2) || self.rope.dims > self.head_dim {
            return Err(BackendError::Dims("rotated dimensions are odd or more than a head has"));
        }
        if self.logits_rows_max > self.rows_max || u32::try_from(self.vocab).is_err() {
            return Err(BackendError::Dims("more rows with logits than rows, or a vocabulary past 2^32"));
        }
        Ok(())
    }
}

impl DeviceTensor {
    /// Refuses another shape than `rows` rows of `cols` values.
    ///
    /// # Errors
    /// [`BackendError::Shape`].
    pub fn want(&self, rows: usize, cols: usize) -> Result<(), BackendError> {
        if (self.rows(), self.cols()) == (rows, cols) {
            return Ok(());
        }
        Err(BackendError::Shape {
            tensor: self.tensor.name().to_owned(),
            shape: self.tensor.shape().to_string(),
            want: if rows == 1 { format!("[{cols}]") } else { format!("[{cols}, {rows}]") },
        })
    }
}

impl Projection<'_> {
    /// Refuses another matrix than of `rows` rows of `cols` values, and another bias than of `rows` values.
    ///
    /// # Errors
    /// [`BackendError::Shape`].
    pub fn want(&self, rows: usize, cols: usize) -> Result<(), BackendError> {
        self.weight.want(rows, cols)?;
        self.bias.map_or(Ok(()), |bias| bias.want(1, rows))
    }
}
