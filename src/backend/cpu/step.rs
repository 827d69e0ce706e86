//! One step's checked batch, and the data that all its layers share: places in the KV cache and attention tiles.

use std::ops::Range;

use super::attention::split_len;
use super::kv::{KvPlace, KvPool};
use super::states::StatePool;
use super::thresholds::ATTENTION_TILE_MAX;
use crate::backend::{BackendError, KV_PAGE_TOKENS, RecurrentPlace, StepBatch, StepLimits};
use crate::program::{Program, Rows};

/// A checked batch. Kept between steps to reuse its allocations.
#[derive(Debug, Default)]
pub struct Step {
    /// Token of each row.
    pub token_ids: Vec<u32>,
    /// Position of each row.
    pub positions: Vec<u32>,
    /// Index of each row's page table.
    sequences: Vec<u32>,
    /// Tokens up to the last row of each sequence, by page table.
    text_lens: Vec<u32>,
    page_tables: Vec<u32>,
    page_table_stride: usize,
    /// Rows that ask for logits.
    pub logits_rows: Vec<u32>,
    /// Destination of each row's key and value.
    pub places: Vec<KvPlace>,
    /// Places of recurrent states, by run.
    pub recurrent: Vec<RecurrentPlace>,
    /// All rows of each sequence, if there are recurrent states.
    pub runs: Vec<Range<usize>>,
    /// Runs of rows of one sequence that attention computes together, for each number of query heads per KV head.
    tiles: Vec<(usize, Vec<Range<usize>>)>,
    /// All rows' splits, rising: (row, split).
    pub splits: Vec<(u32, u32)>,
}

impl Step {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.token_ids.len()
    }

    /// Number of rows that a value has.
    pub fn rows_of(&self, rows: Rows) -> usize {
        match rows {
            Rows::All => self.rows(),
            Rows::Wanted => self.logits_rows.len(),
        }
    }

    /// The page table of a row's sequence.
    pub fn pages(&self, row: usize) -> &[u32] {
        let start = self.sequences[row] as usize * self.page_table_stride;
        &self.page_tables[start..start + self.page_table_stride]
    }

    /// Tokens that a row attends to: its own position and all before it.
    pub fn len(&self, row: usize) -> usize {
        self.positions[row] as usize + 1
    }

    /// Tokens up to the last row of a row's sequence in this step.
    pub fn text_len(&self, row: usize) -> usize {
        self.text_lens[self.sequences[row] as usize] as usize
    }

    /// Runs of rows that attention computes together when `group` query heads share a KV head.
    pub fn tiles(&self, group: usize) -> &[Range<usize>] {
        self.tiles.iter().find(|(of, _)| *of == group).map_or(&[], |(_, tiles)| tiles)
    }

    /// Checks and copies `batch`, and gives memory to the KV pages that its rows write. `groups` lists the distinct
    /// numbers of query heads per KV head.
    ///
    /// # Errors
    /// [`BackendError::Batch`], [`BackendError::OutOfMemory`]; the step is then empty.
    pub fn begin(
        &mut self,
        batch: &StepBatch<'_>,
        program: &Program,
        limits: StepLimits,
        groups: &[usize],
        (kv, states): (&mut KvPool, &mut StatePool),
    ) -> Result<(), BackendError> {
        self.clear();
        batch.check(program, limits)?;
        self.token_ids.extend_from_slice(batch.token_ids);
        self.positions.extend_from_slice(batch.positions);
        self.sequences.extend_from_slice(batch.row_sequences);
        self.page_tables.extend_from_slice(batch.page_tables);
        self.page_table_stride = batch.page_table_stride;
        self.logits_rows.extend_from_slice(batch.logits_rows);
        self.text_lens.resize(batch.page_tables.len() / batch.page_table_stride.max(1), 0);
        for (sequence, position) in self.sequences.iter().zip(&self.positions) {
            self.text_lens[*sequence as usize] = position.saturating_add(1); // they rise
        }
        self.recurrent.extend_from_slice(batch.recurrent);
        let placed = self.place_rows(kv).and_then(|()| self.place_states(states));
        if placed.is_err() {
            self.clear();
            return placed;
        }
        self.cut_splits();
        self.tiles.extend(groups.iter().map(|&group| (group, Vec::new())));
        (0..groups.len()).for_each(|index| self.cut_tiles(index));
        Ok(())
    }

    /// Empties the step.
    pub fn clear(&mut self) {
        self.token_ids.clear();
        self.positions.clear();
        self.sequences.clear();
        self.text_lens.clear();
        self.page_tables.clear();
        self.logits_rows.clear();
        self.places.clear();
        self.recurrent.clear();
        self.runs.clear();
        self.tiles.clear();
        self.splits.clear();
    }

    /// Finds each row's place, gives memory to the pages that rows write, and checks all pages that they read.
    fn place_rows(&mut self, kv: &mut KvPool) -> Result<(), BackendError> {
        for row in 0..self.rows() {
            let position = self.positions[row] as usize;
            let (index, token) = (position / KV_PAGE_TOKENS, position % KV_PAGE_TOKENS);
            let page = *self
                .pages(row)
                .get(index)
                .ok_or(BackendError::Batch("a position is past the end of its page table"))?;
            let place = KvPlace { page, token: token as u32 };
            kv.materialise(page)?;
            self.places.push(place);
        }
        // A sequence's last row in the step reads the most pages; earlier rows read some of the same pages.
        for row in 0..self.rows() {
            let last = self.sequences.get(row + 1) != Some(&self.sequences[row]);
            let pages = self.len(row).div_ceil(KV_PAGE_TOKENS);
            if last && !self.pages(row)[..pages].iter().all(|&page| kv.is_used(page)) {
                return Err(BackendError::Batch("a row attends to a KV page that was never written"));
            }
        }
        Ok(())
    }

    /// Gives memory to the recurrent states that the step writes, and checks that those it reads were written.
    fn place_states(&mut self, states: &mut StatePool) -> Result<(), BackendError> {
        if self.recurrent.is_empty() {
            return Ok(());
        }
        let mut first = 0;
        for run in self.sequences.chunk_by(|a, b| a == b) {
            self.runs.push(first..first + run.len());
            first += run.len();
        }
        // The step's order of sequences, from here on.
        let places = self.runs.iter().map(|rows| self.recurrent[self.sequences[rows.start] as usize]);
        self.recurrent = places.collect();
        for place in &self.recurrent {
            if place.before.is_some_and(|number| !states.is_used(number)) {
                return Err(BackendError::Batch("a recurrent state was never written"));
            }
            states.materialise(place.after)?;
        }
        Ok(())
    }

    fn cut_splits(&mut self) {
        for row in 0..self.rows() {
            let (all, len) = (self.len(row), split_len(self.len(row)));
            self.splits.extend((0..all.div_ceil(len)).map(|split| (row as u32, split as u32)));
        }
    }

    /// Tiles hold adjacent rows of one sequence and one split length, at most as many as fill a tile.
    fn cut_tiles(&mut self, index: usize) {
        let rows_max = (ATTENTION_TILE_MAX / self.tiles[index].0).max(1);
        let mut tiles = Vec::new();
        let mut start = 0;
        for row in 0..self.rows() {
            let next = row + 1;
            let together = next < self.rows()
                && self.sequences[next] == self.sequences[row]
                && split_len(self.len(next)) == split_len(self.len(row))
                && next - start < rows_max;
            if !together {
                tiles.push(start..next);
                start = next;
            }
        }
        self.tiles[index].1 = tiles;
    }
}
