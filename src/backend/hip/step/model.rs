//! One open model: its bound program, KV pages, scratch memory and current step.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::backend::cpu::quant::dequantize_row;
use crate::backend::hip::step::Modes;
use crate::backend::hip::step::addresses::{Addresses, Loads};
use crate::backend::hip::step::arrays::{Arrays, Layout, NO_SEQUENCE, RunOfRows};
use crate::backend::hip::step::bind::{self, Bound, BoundPart, TableRows, Unit, Work};
use crate::backend::hip::step::graphs::{self, Graphs};
use crate::backend::hip::step::kv::KvPool;
use crate::backend::hip::step::rope::RopeTables;
use crate::backend::hip::step::run::{self, Run};
use crate::backend::hip::step::sampling::Sampler;
use crate::backend::hip::step::scratch::{self, SPLITS_MAX, Scratch};
use crate::backend::hip::step::states::StatePool;
use crate::backend::hip::{Buffer, Device, DevicePtr, Stream};
use crate::backend::{BackendError, KV_PAGE_TOKENS, StepBatch, StepLimits, Weights};
use crate::program::{FIRST_PART, Program, TableRow, TensorId};
use crate::tensor::DType;

/// Fewest entries per page table in a step that may be recorded.
const TABLE_MIN: usize = 8;

/// An open model's state on the device.
pub struct OpenModel {
    /// The program to compute.
    pub program: Arc<Program>,
    /// The program, bound to units and memory.
    pub bound: Bound,
    /// The model's KV pages.
    pub kv: KvPool,
    /// The model's recurrent states.
    pub states: StatePool,
    /// Memory between kernels.
    pub scratch: Scratch,
    /// The step's arrays.
    pub arrays: Arrays,
    /// Rotary tables.
    pub ropes: RopeTables,
    /// Addresses of weights, by part number.
    pub addresses: Vec<Addresses>,
    /// Memory for sampling.
    pub sampler: Sampler,
    /// Recorded steps.
    pub graphs: Graphs,
    /// The last step found all its weights resident.
    pub warm: bool,
    /// Each choice of experts is for one set of them, so that `route` can tell whether these are resident.
    routes_alone: bool,
    /// The current step.
    pub step: Step,
}

/// Host-side state of the current step.
#[derive(Debug, Default)]
pub struct Step {
    /// A step has begun.
    pub begun: bool,
    /// Token of each row.
    pub token_ids: Vec<u32>,
    /// Position of each row.
    pub row_positions: Vec<u32>,
    /// Number of rows with logits.
    pub logits_rows: usize,
    /// Highest position of its rows, plus one.
    pub positions: u32,
    /// Attention splits to launch, by window number.
    pub splits: Vec<u32>,
    /// Number of the current part.
    pub part: u32,
    /// Number of the next unit in that part.
    pub unit: usize,
    /// The step's arrays were sent to the device.
    pub sent: bool,
    /// The logits belong to this step.
    pub has_logits: bool,
    /// All parts are launched, or replayed, at the end.
    pub deferred: bool,
    /// Launched without a look at the experts that rows choose. At its end the device says whether all were resident.
    pub unchecked: bool,
}

/// Device bytes that [`OpenModel::open`] takes; `u64::MAX` when that is impossible.
pub fn scratch_bytes(program: &Program, limits: StepLimits, modes: Modes) -> u64 {
    bind::bind(program, limits, modes).map_or(u64::MAX, |bound| open_bytes(&bound, program))
}

/// As [`scratch_bytes`], for a program that is bound.
pub fn open_bytes(bound: &Bound, program: &Program) -> u64 {
    let sampler = Sampler::bytes(program.vocab(), bound.limits.wanted_rows);
    let others = (KvPool::TABLE_BYTES + Arrays::BYTES).saturating_add(sampler);
    scratch::bytes(bound).saturating_add(others)
}

/// Whether no two rows are of one sequence.
fn are_apart(batch: &StepBatch<'_>) -> bool {
    let mut seen = vec![false; batch.page_tables.len() / batch.page_table_stride.max(1)];
    batch.row_sequences.iter().all(|&sequence| {
        // The batch was checked: each sequence has a table.
        seen.get_mut(sequence as usize).is_some_and(|seen| !std::mem::replace(seen, true))
    })
}

impl OpenModel {
    /// Allocates memory for a program, with an empty pool of `pages` KV pages.
    ///
    /// # Errors
    /// Those of [`bind::bind`]; [`BackendError::Device`].
    pub fn open(
        device: &Device,
        stream: &Stream,
        program: &Arc<Program>,
        (limits, modes): (StepLimits, Modes),
        pages: u32,
    ) -> Result<Self, BackendError> {
        let bound = bind::bind(program, limits, modes)?;
        let alone = |unit: &Unit| !matches!(&unit.work, Work::Route(route) if route.sets.len() > 1);
        Ok(Self {
            routes_alone: bound.parts.iter().flat_map(|part| &part.units).all(alone),
            kv: KvPool::new(device, bound.kv.page_bytes, pages)?,
            states: StatePool::new(bound.states.bytes),
            scratch: Scratch::new(device, stream, &bound)?,
            arrays: Arrays::new(device)?,
            ropes: RopeTables::default(),
            addresses: bound.parts.iter().map(|_| Addresses::default()).collect(),
            sampler: Sampler::new(device, stream, program.vocab(), limits.wanted_rows)?,
            graphs: Graphs::default(),
            warm: false,
            step: Step::default(),
            program: Arc::clone(program),
            bound,
        })
    }

    /// Checks a batch, takes it over, and gives memory to the pages that its rows write. With `replay` the step may use
    /// a recorded graph.
    ///
    /// # Errors
    /// [`BackendError::Batch`], [`BackendError::Device`]. No step has begun then.
    pub fn begin(
        &mut self,
        device: &Device,
        stream: &Stream,
        batch: &StepBatch<'_>,
        replay: bool,
    ) -> Result<(), BackendError> {
        self.step.clear();
        batch.check(&self.program, self.bound.limits)?;
        self.place_rows(device, stream, batch)?;
        let runs = self.place_states(device, stream, batch)?;
        let rows = batch.token_ids.len();
        let modes = self.bound.modes;
        self.step.deferred = replay && self.warm && graphs::suits(batch, modes);
        self.step.unchecked = self.step.deferred && self.routes_alone;
        // Rows that all have logits are one of a sequence each.
        let around = self.bound.around;
        let many = around || rows >= modes.thresholds().tiled_from && !graphs::suits(batch, modes);
        let (queries, group) = (self.bound.tile_queries, self.bound.group_max);
        let (alone, tiles) =
            if many { run::tiles(queries, group, batch, around) } else { (rows, Vec::new()) };
        let row_bytes = self.bound.tables.last().map_or(0, |last| last.first + last.row_bytes);
        let mut layout = Layout {
            rows,
            logits: batch.logits_rows.len(),
            tables: batch.page_tables.len(),
            stride: batch.page_table_stride,
            tiles: tiles.len(),
            alone,
            apart: tiles.is_empty() && are_apart(batch),
            ends: if self.bound.both_ways { rows } else { 0 },
            runs: runs.len(),
            embedding_bytes: row_bytes.next_multiple_of(4),
        };
        if let Some(bucket) = graphs::bucket(rows, modes).filter(|_| self.step.deferred) {
            // Few distinct sizes, so that a recorded step is found again.
            (layout.rows, layout.alone) = (bucket, bucket);
            layout.logits = bucket;
            layout.stride = batch.page_table_stride.next_power_of_two().max(TABLE_MIN);
            layout.tables = bucket * layout.stride;
            layout.runs = if runs.is_empty() { 0 } else { bucket };
        }
        self.arrays.lay_out(device, layout)?;
        self.write_arrays(batch, layout);
        self.arrays.set_tiles(tiles.into_iter());
        self.arrays.set_runs(runs.into_iter().chain(padding(rows, layout)));
        if self.bound.both_ways {
            self.arrays.set_ends(ends(batch));
        }
        self.step.token_ids.extend_from_slice(batch.token_ids);
        self.step.row_positions.extend_from_slice(batch.positions);
        self.step.logits_rows = batch.logits_rows.len();
        self.step.positions = batch.positions.iter().max().map_or(0, |last| last.saturating_add(1));
        self.split(batch);
        self.step.begun = true;
        Ok(())
    }

    /// Computes the attention splits to launch: the most of any row, which need not be the last. A step that may be
    /// recorded uses few distinct numbers.
    fn split(&mut self, batch: &StepBatch<'_>) {
        let Step { splits, deferred, .. } = &mut self.step;
        splits.extend(self.bound.windows.iter().map(|window| {
            let of = |position: &u32| run::splits_of(position.saturating_add(1), *window);
            let most = batch.positions.iter().map(of).max().unwrap_or(1);
            if *deferred { most.next_power_of_two().min(SPLITS_MAX) } else { most }
        }));
    }

    fn write_arrays(&self, batch: &StepBatch<'_>, layout: Layout) {
        let filling = layout.rows - batch.token_ids.len();
        let fill = |value| std::iter::repeat_n(value, filling);
        self.arrays.set_positions(batch.positions.iter().copied().chain(fill(0)));
        self.arrays.set_sequences(batch.row_sequences.iter().copied().chain(fill(NO_SEQUENCE)));
        let filled = (batch.logits_rows.len() as u32)..layout.logits as u32;
        self.arrays.set_logits_rows(batch.logits_rows.iter().copied().chain(filled));
        // Page tables past the number of rows are never read.
        let tables = batch.page_tables.chunks(batch.page_table_stride).take(layout.tables / layout.stride);
        for (sequence, table) in tables.enumerate() {
            self.arrays.set_table(sequence, table);
        }
    }

    /// Gives memory to the recurrent states that sequences write, and finds those that they read: by number of the sequence.
    /// Empty if the program has none.
    fn place_states(
        &mut self,
        device: &Device,
        stream: &Stream,
        batch: &StepBatch<'_>,
    ) -> Result<Vec<RunOfRows>, BackendError> {
        if !self.program.is_recurrent() {
            return Ok(Vec::new());
        }
        let mut runs = vec![RunOfRows::default(); batch.recurrent.len()];
        let mut first = 0;
        for rows in batch.row_sequences.chunk_by(|a, b| a == b) {
            let sequence = rows.first().map_or(0, |sequence| *sequence as usize);
            let (Some(run), Some(place)) = (runs.get_mut(sequence), batch.recurrent.get(sequence)) else {
                return Err(BackendError::Batch("a sequence has no place for its recurrent states"));
            };
            let before = match place.before {
                None => 0,
                Some(number) => {
                    let known = self.states.address(number);
                    known.ok_or(BackendError::Batch("a recurrent state was never written"))?
                }
            };
            let after = self.states.materialise(device, stream, place.after)?;
            *run = RunOfRows { first, rows: rows.len() as u32, before, after };
            first += rows.len() as u32;
        }
        Ok(runs)
    }

    /// Gives memory to pages that rows write, and checks all pages that rows read.
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
            let page = *page.ok_or(BackendError::Batch("a position is past the end of its page table"))?;
            self.kv.materialise(device, stream, page)?;
        }
        // A sequence's last row in the step reads the most; its earlier rows read a prefix of that.
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
}

impl OpenModel {
    /// Enters a part, or continues the current one.
    ///
    /// # Errors
    /// [`BackendError::OutOfOrder`] if no step has begun or it is not the part's turn; [`BackendError`] of tables and
    /// launches.
    pub fn enter(
        &mut self,
        device: &Device,
        stream: &Stream,
        part: u32,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        if !self.step.begun {
            return Err(BackendError::OutOfOrder("no step has begun"));
        }
        let generation = weights.generations.get(part as usize).copied();
        let bound = self.bound.parts.get(part as usize).filter(|_| part == self.step.part);
        let addresses = self.addresses.get_mut(part as usize);
        let (Some(bound), Some(addresses), Some(generation)) = (bound, addresses, generation) else {
            return Err(BackendError::OutOfOrder("a part was run out of turn"));
        };
        addresses.enter(bound, weights, generation);
        let lacks = addresses.lacks_any() && !self.step.unchecked;
        if part == FIRST_PART && self.step.unit == 0 {
            self.bound.tables.iter().try_for_each(|tables| self.take_embeddings(tables))?;
        }
        if lacks {
            // The remaining units depend on the choice of experts, so the step is launched directly from here on.
            self.launch_deferred(device, stream)?;
        }
        Ok(())
    }

    /// Copies the rows of the step's tokens from each embedding table of the file, or their sums with rows of other tables.
    fn take_embeddings(&self, tables: &TableRows) -> Result<(), BackendError> {
        let TableRows { table, row_bytes, first, scale, added } = tables;
        let row_of = |table: TensorId, row: usize| {
            let missing =
                || BackendError::Batch("a token or a position is past the end of the model's table");
            let lazy = self.program.tensor(table).map(|table| &table.lazy).ok_or_else(missing)?;
            let bytes = lazy.byte_len() as usize / (lazy.shape().rows() as usize).max(1);
            let bytes = lazy.bytes().get(row * bytes..(row + 1) * bytes).ok_or_else(missing)?;
            Ok::<_, BackendError>((lazy.dtype(), bytes))
        };
        let (mut sum, mut more) = (vec![0f32; row_bytes / 4], vec![0f32; row_bytes / 4]);
        for (row, (&id, &position)) in self.step.token_ids.iter().zip(&self.step.row_positions).enumerate() {
            let (dtype, bytes) = row_of(*table, id as usize)?;
            if added.is_empty() {
                self.arrays.set_embedding(row, *first, bytes);
                continue;
            }
            decode(dtype, bytes, &mut sum)?;
            sum.iter_mut().for_each(|x| *x *= scale);
            for (table, of) in added {
                let at = if *of == TableRow::Position { position as usize } else { 0 };
                let (dtype, bytes) = row_of(*table, at)?;
                decode(dtype, bytes, &mut more)?;
                sum.iter_mut().zip(&more).for_each(|(x, more)| *x += more);
            }
            let bytes: Vec<u8> = sum.iter().flat_map(|x| x.to_ne_bytes()).collect();
            self.arrays.set_embedding(row, *first, &bytes);
        }
        Ok(())
    }

    /// The next unit of the current part; `None` at the part's end.
    pub fn unit(&self) -> Option<&Unit> {
        self.bound.parts.get(self.step.part as usize)?.units.get(self.step.unit)
    }

    /// Looks up the addresses of the current unit's weights, and makes the rotary tables that it reads.
    ///
    /// # Errors
    /// As [`Addresses::look_up`] and [`RopeTables::cover`].
    pub fn look_up(&mut self, loads: &Loads<'_>, weights: &Weights<'_>) -> Result<(), BackendError> {
        let Some(part) = self.bound.parts.get(self.step.part as usize) else { return Ok(()) };
        let (Some(unit), Some(addresses)) =
            (part.units.get(self.step.unit), self.addresses.get_mut(self.step.part as usize))
        else {
            return Ok(());
        };
        addresses.look_up(loads, &self.program, part, unit, weights)?;
        if unit.work.turns() {
            // Not before: a model's first tables take the host some ms, in which its first layers are already in flight.
            self.ropes.cover(loads.device, loads.stream, &self.program, self.step.positions)?;
        }
        Ok(())
    }

    /// Launches this unit, unless the step is deferred, and moves to the next.
    ///
    /// # Errors
    /// [`BackendError`] of a launch.
    pub fn advance(&mut self, device: &Device, stream: &Stream) -> Result<(), BackendError> {
        let unit = self.step.unit;
        if !self.step.deferred {
            self.send(device, stream)?;
            self.launch(&self.run(device, stream)?, self.step.part, unit..unit + 1)?;
        }
        self.step.unit += 1;
        Ok(())
    }

    /// Launches all deferred units of the step.
    ///
    /// # Errors
    /// [`BackendError`] of a launch.
    pub fn launch_deferred(&mut self, device: &Device, stream: &Stream) -> Result<(), BackendError> {
        if !std::mem::take(&mut self.step.deferred) {
            return Ok(());
        }
        self.send(device, stream)?;
        self.launch_all(&self.run(device, stream)?)
    }

    /// Launches all units of the step so far.
    ///
    /// # Errors
    /// [`BackendError`] of a launch.
    pub fn launch_all(&self, run: &Run<'_>) -> Result<(), BackendError> {
        (FIRST_PART..self.step.part).try_for_each(|part| self.launch(run, part, 0..usize::MAX))?;
        self.launch(run, self.step.part, 0..self.step.unit)
    }

    fn launch(&self, run: &Run<'_>, part: u32, units: Range<usize>) -> Result<(), BackendError> {
        let (bound, addresses) = (self.bound.parts.get(part as usize), self.addresses.get(part as usize));
        let (Some(bound), Some(addresses)) = (bound, addresses) else { return Ok(()) };
        let (weights, units) = (addresses.weights(), units.start..units.end.min(bound.units.len()));
        bound.units.get(units).unwrap_or_default().iter().try_for_each(|unit| run.launch(unit, &weights))
    }

    fn send(&mut self, device: &Device, stream: &Stream) -> Result<(), BackendError> {
        if !std::mem::replace(&mut self.step.sent, true) {
            self.arrays.send(stream)?;
            self.kv.send_table(device, stream)?;
        }
        Ok(())
    }

    /// Makes the state that all units of the step share.
    ///
    /// # Errors
    /// [`BackendError`] when arrays exceed their buffer: a bug.
    pub fn run<'a>(&'a self, device: &'a Device, stream: &'a Stream) -> Result<Run<'a>, BackendError> {
        Ok(Run {
            device,
            stream,
            bound: &self.bound,
            scratch: &self.scratch,
            layout: self.arrays.layout(),
            places: self.arrays.places()?,
            pages: self.kv.table().ptr(),
            splits: &self.step.splits,
            tokens: self.step.positions.checked_next_power_of_two().unwrap_or(u32::MAX),
            angles: self.ropes.addresses(),
            absent: if self.step.unchecked { self.scratch.absent.ptr() } else { DevicePtr::NULL },
        })
    }

    /// Whether a row chose an expert that is not resident, in a step that was launched unchecked. Its results are undefined
    /// then. The device must be idle if [`OpenModel::may_lack`].
    ///
    /// # Errors
    /// [`BackendError`] of a copy.
    pub fn lacked(&self, stream: &Stream) -> Result<bool, BackendError> {
        let mut absent = [0u32];
        if self.may_lack() {
            stream.download(self.scratch.absent.range(0, size_of::<u32>())?, absent.as_mut_slice())?;
        }
        Ok(absent != [0])
    }

    /// Whether the step was launched unchecked with experts that are not resident.
    pub fn may_lack(&self) -> bool {
        self.step.unchecked && self.addresses.iter().any(Addresses::lacks_any)
    }

    /// Takes the step back to its first part, where it looks at the experts that rows choose.
    ///
    /// # Errors
    /// [`BackendError`] of a launch.
    pub fn start_again(&mut self, stream: &Stream) -> Result<(), BackendError> {
        (self.step.part, self.step.unit) = (FIRST_PART, 0);
        (self.step.unchecked, self.step.deferred) = (false, false);
        Ok(stream.fill(self.scratch.absent.all(), 0)?)
    }

    /// The logits of all rows that want them, one row after the other.
    ///
    /// # Errors
    /// [`BackendError::Internal`]: a bug.
    pub fn logits(&self) -> Result<&Buffer, BackendError> {
        let none = || BackendError::Internal("the program has no logits".to_owned());
        self.scratch.buffer(&self.bound, self.bound.logits.ok_or_else(none)?.plane)
    }

    /// Copies these rows of the last layer to the host; `None` if the program's head takes none. The device must be idle.
    ///
    /// # Errors
    /// [`BackendError`] of a copy.
    pub fn last_rows(&self, stream: &Stream, rows: Range<u32>) -> Result<Option<Vec<f32>>, BackendError> {
        let last = self.program.last_rows().and_then(|last| self.program.values().get(last.value.0 as usize));
        let (Some(view), Some(value)) = (self.bound.last_rows, last) else { return Ok(None) };
        let (stride, width, count) = (view.stride as usize, value.width as usize, rows.len());
        let first = rows.start as usize * stride + view.column as usize;
        // The last row ends with its own values.
        let mut wide = vec![0f32; count.saturating_sub(1) * stride + if count > 0 { width } else { 0 }];
        let buffer = self.scratch.buffer(&self.bound, view.plane)?;
        stream.download(buffer.range(first * 4, wide.len() * 4)?, wide.as_mut_slice())?;
        Ok(Some(wide.chunks(stride.max(1)).flat_map(|row| row.iter().take(width)).copied().collect()))
    }

    /// Whether the unit that just ran chooses among experts of which some are not resident.
    pub fn lacks_chosen(&self) -> bool {
        let addresses = self.addresses.get(self.step.part as usize);
        let lacks = |set: &usize| addresses.is_some_and(|addresses| addresses.lacks(*set));
        let of_last = || matches!(self.last(), Some(Unit { work: Work::Route(route), .. }) if route.sets.iter().any(lacks));
        !self.step.unchecked && of_last()
    }

    fn last(&self) -> Option<&Unit> {
        self.bound.parts.get(self.step.part as usize)?.units.get(self.step.unit.checked_sub(1)?)
    }

    /// Tensors of the experts that rows chose in the last unit and that are not resident. The device must be idle.
    ///
    /// # Errors
    /// [`BackendError`] of copies.
    pub fn missing(&self, stream: &Stream, weights: &Weights<'_>) -> Result<Vec<TensorId>, BackendError> {
        let Some(Unit { work: Work::Route(route), .. }) = self.last() else { return Ok(Vec::new()) };
        let used = route.out.used as usize;
        // Padding rows, which follow, choose no experts.
        let mut chosen = vec![0u32; self.step.token_ids.len() * used];
        let buffer = self.scratch.buffer(&self.bound, route.out.chosen)?;
        stream.download(buffer.range(0, chosen.len() * 4)?, chosen.as_mut_slice())?;
        chosen.sort_unstable();
        chosen.dedup();
        let part: Option<&BoundPart> = self.bound.parts.get(self.step.part as usize);
        let sets = route.sets.iter().filter_map(|set| part?.experts.get(*set));
        let tensors = sets.flat_map(|set| chosen.iter().flat_map(|expert| set.range.each(*expert)));
        Ok(tensors.filter(|id| !weights.has(*id)).collect())
    }
}

/// The padding rows of a step of `rows` rows, each a sequence of its own without states.
fn padding(rows: usize, layout: Layout) -> impl Iterator<Item = RunOfRows> {
    let fill = (rows..layout.rows).map(|row| RunOfRows { first: row as u32, rows: 1, before: 0, after: 0 });
    fill.chain(std::iter::repeat(RunOfRows::default()))
}

/// The last position of each row's sequence in the step.
fn ends(batch: &StepBatch<'_>) -> impl Iterator<Item = u32> {
    let mut last: HashMap<u32, u32> = HashMap::new();
    last.extend(batch.row_sequences.iter().copied().zip(batch.positions.iter().copied())); // they rise
    batch.row_sequences.iter().map(move |sequence| last.get(sequence).copied().unwrap_or(0))
}

/// The values of a row of a table.
fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), BackendError> {
    dequantize_row(dtype, bytes, out).map_err(|error| BackendError::Internal(error.to_string()))
}

impl Step {
    /// Resets to no step, keeping the allocations.
    pub fn clear(&mut self) {
        let mut kept = std::mem::take(self);
        kept.token_ids.clear();
        kept.row_positions.clear();
        kept.splits.clear();
        let Self { token_ids, row_positions, splits, .. } = kept;
        *self = Self { token_ids, row_positions, splits, ..Self::default() };
    }
}
