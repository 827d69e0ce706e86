//! A step's arrays on the device: written into host words that host and device share, and sent by one small copy.
//!
//! They lie one after the other, each at a multiple of 16 bytes. First are positions and sequences of the rows, rows
//! with logits, page tables, attention tiles, the ends of texts, and the runs of recurrent states. Then come the embedding
//! bytes of each row as in the file. Their offsets depend only on their sizes, so a recorded step finds them again.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::backend::BackendError;
use crate::backend::hip::kernels::recurrent::RUN_WORDS;
use crate::backend::hip::{Buffer, Device, DevicePtr, HipError, HostWords, Purpose, Stream};

/// Words allocated at first.
const WORDS_MIN: usize = 1 << 14;

/// Value in `row_seq` of a padding row (`NO_SEQUENCE` of kernels/common/pages.h).
pub const NO_SEQUENCE: u32 = u32::MAX;

/// Sizes of a step's arrays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Rows, padding rows included.
    pub rows: usize,
    /// Rows with logits.
    pub logits: usize,
    /// Page numbers of all tables together.
    pub tables: usize,
    /// Page numbers per table.
    pub stride: usize,
    /// Tiles of prefill attention.
    pub tiles: usize,
    /// The first rows, which are in no tile. All rows if there are no tiles.
    pub alone: usize,
    /// No two rows are of one sequence, and there are no tiles.
    pub apart: bool,
    /// Rows whose text's last position is there: all for attention to later positions, else none.
    pub ends: usize,
    /// Sequences with recurrent states; 0 if the program has none.
    pub runs: usize,
    /// Bytes from one row's embedding to the next.
    pub embedding_bytes: usize,
}

/// The rows of a sequence in a step, and the addresses of its recurrent states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunOfRows {
    /// The first row.
    pub first: u32,
    /// Number of rows.
    pub rows: u32,
    /// The array to read, 0 before a sequence's first position.
    pub before: u64,
    /// The array to write, 0 for a padding row.
    pub after: u64,
}

impl RunOfRows {
    /// As kernels read it: kernels/recurrent/runs.h.
    fn words(&self) -> [u32; RUN_WORDS] {
        let halves = |address: u64| [address as u32, (address >> 32) as u32];
        let ([before, before_high], [after, after_high]) = (halves(self.before), halves(self.after));
        [self.first, self.rows, 0, 0, before, before_high, after, after_high]
    }
}

/// Words for `count` values, rounded up so that the next array starts at a multiple of 16 bytes.
fn room(count: usize) -> usize {
    count.next_multiple_of(4)
}

impl Layout {
    fn sequences_at(&self) -> usize {
        room(self.rows)
    }

    fn logits_at(&self) -> usize {
        self.sequences_at() + room(self.rows)
    }

    fn tables_at(&self) -> usize {
        self.logits_at() + room(self.logits)
    }

    fn tiles_at(&self) -> usize {
        self.tables_at() + room(self.tables)
    }

    fn ends_at(&self) -> usize {
        self.tiles_at() + room(2 * self.tiles)
    }

    fn runs_at(&self) -> usize {
        self.ends_at() + room(self.ends)
    }

    fn embedding_at(&self) -> usize {
        self.runs_at() + RUN_WORDS * self.runs
    }

    fn words(&self) -> usize {
        self.embedding_at() + room(self.rows * self.embedding_bytes / 4 + 1)
    }
}

/// Addresses of a step's arrays on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// Position of each row.
    pub positions: DevicePtr<u32>,
    /// Page table of each row.
    pub sequences: DevicePtr<u32>,
    /// Rows with logits.
    pub logits_rows: DevicePtr<u32>,
    /// Page numbers of all tables.
    pub tables: DevicePtr<u32>,
    /// First row and row count of each tile.
    pub tiles: DevicePtr<u32>,
    /// Last position of each row's sequence in the step.
    pub ends: DevicePtr<u32>,
    /// Rows and arrays of each sequence with recurrent states.
    pub runs: DevicePtr<u32>,
    /// Embedding bytes of each row.
    pub embeddings: DevicePtr<u8>,
}

/// The arrays of the current step.
#[derive(Debug)]
pub struct Arrays {
    words: Arc<HostWords>,
    buffer: Buffer,
    layout: Layout,
}

impl Arrays {
    /// Device bytes of empty arrays.
    pub const BYTES: u64 = (WORDS_MIN * 4) as u64;

    /// Empty arrays with room for small steps.
    ///
    /// # Errors
    /// [`HipError`].
    pub fn new(device: &Device) -> Result<Self, HipError> {
        let words = WORDS_MIN;
        Ok(Self {
            words: device.host_words(words)?,
            buffer: device.take(words * 4, Purpose::Scratch)?,
            layout: Layout::default(),
        })
    }

    /// Computes a new layout. The last step's copy must be done.
    ///
    /// # Errors
    /// [`HipError`] when the arrays must grow and memory is short.
    pub fn lay_out(&mut self, device: &Device, layout: Layout) -> Result<(), HipError> {
        let need = layout.words();
        if need > self.words.words().len() {
            let words = need.next_power_of_two();
            self.words = device.host_words(words)?;
            self.buffer = device.take(words * 4, Purpose::Scratch)?;
        }
        self.layout = layout;
        Ok(())
    }

    /// Sizes of the arrays.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Writes positions.
    pub fn set_positions(&self, values: impl Iterator<Item = u32>) {
        self.set(0, values);
    }

    /// Writes sequences.
    pub fn set_sequences(&self, values: impl Iterator<Item = u32>) {
        self.set(self.layout.sequences_at(), values);
    }

    /// Writes rows with logits.
    pub fn set_logits_rows(&self, values: impl Iterator<Item = u32>) {
        self.set(self.layout.logits_at(), values);
    }

    /// Writes table number `sequence`. Entries past the stride are dropped.
    pub fn set_table(&self, sequence: usize, pages: &[u32]) {
        let at = self.layout.tables_at() + sequence * self.layout.stride;
        self.set(at, pages.iter().copied().take(self.layout.stride));
    }

    /// Writes tiles: first row and row count of each.
    pub fn set_tiles(&self, tiles: impl Iterator<Item = [u32; 2]>) {
        self.set(self.layout.tiles_at(), tiles.flatten());
    }

    /// Writes the last positions of the rows' sequences.
    pub fn set_ends(&self, values: impl Iterator<Item = u32>) {
        self.set(self.layout.ends_at(), values.take(self.layout.ends));
    }

    /// Writes the rows and arrays of sequences with recurrent states.
    pub fn set_runs(&self, runs: impl Iterator<Item = RunOfRows>) {
        let words = runs.take(self.layout.runs).flat_map(|run| run.words());
        self.set(self.layout.runs_at(), words);
    }

    /// Identity of the host words. It changes when they are replaced, as long as some purpose keeps the old ones.
    pub fn identity(&self) -> usize {
        Arc::as_ptr(&self.words).addr()
    }

    /// Writes embedding bytes of a row, from its byte `first` on, a multiple of 4.
    pub fn set_embedding(&self, row: usize, first: usize, bytes: &[u8]) {
        let at = self.layout.embedding_at() + (row * self.layout.embedding_bytes + first) / 4;
        let (words, rest) = bytes.as_chunks::<4>();
        let mut last = [0; 4];
        rest.iter().zip(&mut last).for_each(|(from, to)| *to = *from);
        let last = (!rest.is_empty()).then_some(last);
        self.set(at, words.iter().copied().chain(last).map(u32::from_ne_bytes));
    }

    fn set(&self, at: usize, values: impl Iterator<Item = u32>) {
        let words = self.words.words().get(at..).unwrap_or_default();
        words.iter().zip(values).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
    }

    /// Starts the copy to the device. When captured into a graph, each replay copies again.
    ///
    /// # Errors
    /// [`HipError`].
    pub fn send(&self, stream: &Stream) -> Result<(), HipError> {
        stream.upload_words(self.buffer.range(0, self.layout.words() * 4)?, &self.words, 0)
    }

    /// Addresses on the device.
    ///
    /// # Errors
    /// [`BackendError`] when the layout exceeds the buffer: a bug.
    pub fn places(&self) -> Result<Places, BackendError> {
        let layout = &self.layout;
        let at = |word: usize| self.buffer.ptr_at::<u32>(word * 4);
        // Each ends where its array does, so that no kernel reads on into the next array.
        Ok(Places {
            positions: at(0)?.first(layout.rows),
            sequences: at(layout.sequences_at())?.first(layout.rows),
            logits_rows: at(layout.logits_at())?.first(layout.logits),
            tables: at(layout.tables_at())?.first(layout.tables),
            tiles: at(layout.tiles_at())?.first(2 * layout.tiles),
            ends: at(layout.ends_at())?.first(layout.ends),
            runs: at(layout.runs_at())?.first(RUN_WORDS * layout.runs),
            embeddings: at(layout.embedding_at())?.cast().first(layout.rows * layout.embedding_bytes),
        })
    }
}
