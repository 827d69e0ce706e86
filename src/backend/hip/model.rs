//! One open model: its sizes, KV pages, room between kernels, and the step at hand.

use super::arrays::{Arrays, Layout, NO_SEQUENCE};
use super::experts::ExpertTables;
use super::graphs::{self, Graphs};
use super::kv::KvPool;
use super::rope::RopeTable;
use super::run::{self, Op, Run};
use super::sampling::Sampler;
use super::scratch::{self, MATRIX_ROWS, SPLITS_MAX, Scratch};
use super::{Device, Stream};
use crate::backend::{Activations, BackendError, KV_PAGE_TOKENS, KvType, ModelDims, StepBatch};

/// Entries of a page table in a step that may be recorded, at least.
const TABLE_MIN: usize = 8;

/// A model's room on the device.
pub struct Model {
    /// Sizes.
    pub dims: ModelDims,
    /// KV pages.
    pub kv: KvPool,
    /// Room between kernels.
    pub scratch: Scratch,
    /// The step's numbers.
    pub arrays: Arrays,
    /// Cosines and sines.
    pub rope: RopeTable,
    /// Where experts are.
    pub experts: ExpertTables,
    /// Room for drawing tokens.
    pub sampler: Sampler,
    /// Steps recorded for replays.
    pub graphs: Graphs,
    /// The last step found all its weights there.
    pub warm: bool,
    /// The step at hand.
    pub step: Step,
}

/// What is known of the step at hand on the host.
#[derive(Debug, Default)]
pub struct Step {
    /// Token of each row.
    pub token_ids: Vec<u32>,
    /// Rows with logits.
    pub logits_rows: usize,
    /// Positions that its rows attend to, at most.
    pub positions: u32,
    /// Operations so far; those before `launched` are under way.
    pub ops: Vec<Op>,
    /// How many of `ops` were launched.
    pub launched: usize,
    /// The logits are those of this step.
    pub has_logits: bool,
    /// All operations are launched at the end, or replayed.
    pub deferred: bool,
}

/// How a backend computes: the same for all its models.
#[derive(Clone, Copy, Debug)]
pub struct Modes {
    /// What quantised weights meet.
    pub activations: Activations,
    /// Element of KV pages.
    pub kv: KvType,
}

/// What [`Model::open`] takes of the device; `u64::MAX` when there can be no such room.
pub fn scratch_bytes(dims: &ModelDims) -> u64 {
    let others = KvPool::TABLE_BYTES + Arrays::BYTES + Sampler::bytes(dims);
    scratch::bytes(dims).saturating_add(others)
}

impl Model {
    /// Room for a model of sizes `dims`, with an empty pool of `pages` KV pages.
    ///
    /// # Errors
    /// [`BackendError::Dims`], [`BackendError::Device`].
    pub fn open(
        device: &Device,
        stream: &Stream,
        dims: &ModelDims,
        kv: KvType,
        pages: u32,
    ) -> Result<Self, BackendError> {
        dims.check()?;
        // What kernels count in 32 bits, and what their blocks have room for.
        let heads =
            dims.n_heads.saturating_add(dims.n_kv_heads.saturating_mul(2)).saturating_mul(dims.head_dim);
        let widest = [dims.hidden, heads, dims.ffn.saturating_mul(2), dims.vocab, dims.rows_max];
        if widest.into_iter().any(|size| size > 1 << 24) || dims.rows_max > 65535 {
            return Err(BackendError::Dims("a size is more than the kernels count"));
        }
        let pairs = dims.experts.as_ref().map_or(0, |e| e.used.saturating_mul(dims.rows_max));
        if pairs > 65535 || dims.experts.as_ref().is_some_and(|e| e.count > 512) {
            return Err(BackendError::Dims("more experts than the kernels count"));
        }
        if dims.head_dim > 256 || !dims.head_dim.is_multiple_of(2) {
            return Err(BackendError::Dims("the kernels take even heads of at most 256 values"));
        }
        Ok(Self {
            kv: KvPool::new(device, dims, kv, pages)?,
            scratch: Scratch::new(device, stream, dims)?,
            arrays: Arrays::new(device)?,
            rope: RopeTable::default(),
            sampler: Sampler::new(device, stream, dims)?,
            experts: ExpertTables::default(),
            graphs: Graphs::default(),
            warm: false,
            step: Step::default(),
            dims: dims.clone(),
        })
    }

    /// Takes over a batch after checking it, and gives memory to the pages that its rows write. With `replay` the step may
    /// be one for a recorded graph.
    ///
    /// # Errors
    /// [`BackendError::Batch`], [`BackendError::Device`]; there is no step then.
    pub fn begin(
        &mut self,
        device: &Device,
        stream: &Stream,
        batch: &StepBatch<'_>,
        replay: bool,
    ) -> Result<(), BackendError> {
        self.step.clear();
        batch.check(&self.dims)?;
        self.place_rows(device, stream, batch)?;
        let rows = batch.token_ids.len();
        self.step.deferred = replay && self.warm && graphs::suits(batch);
        let tiles = if rows >= MATRIX_ROWS { run::tiles(&self.dims, batch) } else { Vec::new() };
        let mut layout = Layout {
            rows,
            logits: batch.logits_rows.len(),
            tables: batch.page_tables.len(),
            stride: batch.page_table_stride,
            tiles: tiles.len(),
            embedding_bytes: self.dims.hidden * 4, // of no type is a row longer
        };
        if let Some(bucket) = graphs::bucket(rows).filter(|_| self.step.deferred) {
            // So few different sizes that a recorded step is found again.
            layout.rows = bucket;
            layout.logits = bucket;
            layout.stride = batch.page_table_stride.next_power_of_two().max(TABLE_MIN);
            layout.tables = bucket * layout.stride;
        }
        self.arrays.lay_out(device, layout)?;
        self.write_arrays(batch, layout);
        self.arrays.set_tiles(tiles.into_iter());
        self.step.token_ids.extend_from_slice(batch.token_ids);
        self.step.logits_rows = batch.logits_rows.len();
        self.step.positions = batch.positions.iter().max().map_or(0, |last| last.saturating_add(1));
        Ok(())
    }

    fn write_arrays(&self, batch: &StepBatch<'_>, layout: Layout) {
        let filling = layout.rows - batch.token_ids.len();
        let fill = |value| std::iter::repeat_n(value, filling);
        self.arrays.set_positions(batch.positions.iter().copied().chain(fill(0)));
        self.arrays.set_sequences(batch.row_sequences.iter().copied().chain(fill(NO_SEQUENCE)));
        let filled = (batch.logits_rows.len() as u32)..layout.logits as u32;
        self.arrays.set_logits_rows(batch.logits_rows.iter().copied().chain(filled));
        // More tables than rows are not read by any.
        let tables = batch.page_tables.chunks(batch.page_table_stride).take(layout.tables / layout.stride);
        for (sequence, table) in tables.enumerate() {
            self.arrays.set_table(sequence, table);
        }
    }

    /// Gives memory to the pages that are written, and checks all that are read.
    fn place_rows(
        &mut self,
        device: &Device,
        stream: &Stream,
        batch: &StepBatch<'_>,
    ) -> Result<(), BackendError> {
        let table = |row: usize| {
            let sequence = batch.row_sequences.get(row).map_or(0, |s| *s as usize);
            let start = sequence * batch.page_table_stride;
            batch.page_tables.get(start..start + batch.page_table_stride).unwrap_or_default()
        };
        for (row, &position) in batch.positions.iter().enumerate() {
            let page = table(row).get(position as usize / KV_PAGE_TOKENS);
            let page = *page.ok_or(BackendError::Batch("a position past the end of its page table"))?;
            self.kv.materialise(device, stream, page)?;
        }
        // A sequence's last row in the step reads the most; its earlier rows read a part of that.
        for (row, &position) in batch.positions.iter().enumerate() {
            if batch.row_sequences.get(row + 1) == batch.row_sequences.get(row) {
                continue;
            }
            let pages = table(row).get(..=position as usize / KV_PAGE_TOKENS).unwrap_or_default();
            if !pages.iter().all(|&page| self.kv.is_used(page)) {
                return Err(BackendError::Batch("a row attends to a KV page that was never written"));
            }
        }
        Ok(())
    }

    /// Splits to launch for; of few different numbers where a step may be recorded.
    fn splits(&self) -> u32 {
        let splits = run::splits_of(self.step.positions);
        if self.step.deferred { splits.next_power_of_two().min(SPLITS_MAX) } else { splits }
    }

    /// What the operations of the step at hand have in common.
    ///
    /// # Errors
    /// [`BackendError`] for arrays past their buffer: a bug.
    pub fn run<'a>(
        &'a self,
        device: &'a Device,
        stream: &'a Stream,
        modes: Modes,
    ) -> Result<Run<'a>, BackendError> {
        Ok(Run {
            device,
            stream,
            dims: &self.dims,
            activations: modes.activations,
            kv: modes.kv,
            scratch: &self.scratch,
            layout: self.arrays.layout(),
            places: self.arrays.places()?,
            pages: self.kv.table().ptr(),
            layer_bytes: self.kv.layer_bytes(),
            splits: self.splits(),
        })
    }
}

impl Step {
    /// Makes it no step.
    pub fn clear(&mut self) {
        self.token_ids.clear();
        self.logits_rows = 0;
        self.positions = 0;
        self.ops.clear();
        self.launched = 0;
        self.has_logits = false;
        self.deferred = false;
    }
}
