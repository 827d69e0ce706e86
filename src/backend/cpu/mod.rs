//! The CPU backend: computes directly from the mapped file.
//!
//! `bind` turns a program's operations into units, `run` runs them with the phases of `compute` (products,
//! activations), and `model` holds the state of an open model. Kernels are single-threaded functions; `pool` and
//! `grid` distribute them.
//!
//! Every sum has one order, fixed by its length. So no bit of a row depends on other rows, on their number, on threads
//! or on the instruction set. Nor does it matter how a prompt was cut into steps.

pub mod activations;
#[allow(unsafe_code)]
mod attention;
mod bind;
mod compute;
pub mod convert;
pub mod cores;
mod experts;
#[allow(unsafe_code)]
mod grid;
pub mod isa;
#[allow(unsafe_code)]
mod kv;
pub mod matmul;
#[allow(unsafe_code)]
mod memory;
mod model;
mod norm;
#[allow(unsafe_code)]
mod pool;
#[allow(unsafe_code)]
mod prefetch;
pub mod quant;
mod recur;
mod rope;
mod row_ops;
mod run;
pub(super) mod sample;
#[allow(unsafe_code)]
mod scratch;
#[allow(unsafe_code)]
mod simd;
mod slices;
mod states;
mod step;
pub mod thresholds;

pub use isa::{Isa, Kernels};
pub use run::refuses;
pub use slices::Slices;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

pub(super) use compute::append_values;
use compute::{Compute, Worker};
use model::OpenModel;
use pool::Pool;
use sample::Sampler;
use simd::Level;
use thresholds::{SEQUENCES, STEP_ROWS};

use super::{
    ActivationType, Backend, BackendError, BackendInfo, Cause, DeviceTensor, KvType, ModelSlot, Progress,
    SampleRow, Sampled, StepBatch, StepLimits, Storage, Weights, cause,
};
use crate::program::{Program, ValueId};
use crate::tensor::LazyTensor;

/// Options of the CPU backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Compute threads, including the engine's own. `None`, or more than [`cores::available`], means that number.
    pub threads: Option<usize>,
    /// Instruction set; `None` means the best available.
    pub isa: Option<Isa>,
    /// Form of the activations that quantised weights meet.
    pub activations: ActivationType,
    /// Element type of the KV cache.
    pub kv: KvType,
    /// Runs each operation of a program by itself, in the plainest way. For checking; gives the same bits.
    pub unfused: bool,
}

/// The CPU as a [`Backend`]. Weights are read from the mapped file; nothing is copied or repacked.
pub struct CpuBackend {
    compute: Compute,
    kv: KvType,
    unfused: bool,
    device: String,
    models: HashMap<ModelSlot, OpenModel>,
    /// The model whose step is running.
    current: Option<ModelSlot>,
    next_slot: u32,
    samplers: Vec<Sampler>,
    notes: Vec<(&'static str, String)>,
}

impl CpuBackend {
    /// Starts the compute threads.
    ///
    /// # Errors
    /// [`BackendError::Start`] if the processor lacks the requested instruction set, or a thread cannot be started.
    pub fn new(options: CpuOptions) -> Result<Self, BackendError> {
        let available = cores::available();
        Self::with_exact_threads(options, options.threads.unwrap_or(available).min(available))
    }

    /// As [`new`](Self::new) with exactly this many threads, at least one, even beyond the number of cores: threads
    /// then share cores. For checks that results do not depend on the number of threads.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_exact_threads(options: CpuOptions, threads: usize) -> Result<Self, BackendError> {
        let start = |what: &'static str, source: Cause| BackendError::Start { what, source };
        let kernels = match options.isa {
            None => Kernels::detect(),
            Some(isa) => Kernels::new(isa).map_err(|e| start("the instruction set", cause(e)))?,
        };
        let pool = Pool::new(threads).map_err(|e| start("a compute thread", cause(e)))?;
        let workers = (0..pool.threads()).map(|_| Worker::default()).collect();
        let (level, mode) = (Level::of(kernels), options.activations);
        Ok(Self {
            compute: Compute {
                kernels,
                level,
                mode,
                pool,
                workers,
                bias: Vec::new(),
                slices: Slices::default(),
            },
            kv: options.kv,
            unfused: options.unfused,
            device: cores::model_name(),
            models: HashMap::new(),
            current: None,
            next_slot: 0,
            samplers: Vec::new(),
            notes: Vec::new(),
        })
    }

    /// Cuts units in another way. For checks that results do not depend on the cuts.
    pub fn set_slices(&mut self, slices: Slices) {
        self.compute.slices = slices;
    }

    /// A row of a value as the last unit left it, for checks of single parts. `None` outside a step, past its rows,
    /// and for a value that no unit keeps.
    pub fn value(&self, value: ValueId, row: usize) -> Option<Vec<f32>> {
        let model = self.models.get(&self.current?)?;
        let place = model.bound.place(value)?;
        (row < model.now.step.rows()).then(|| model.now.values.row(place, row).to_vec())
    }

    /// Adds an entry to the notes of `info`, such as why the CPU computes.
    #[must_use]
    pub fn with_note(mut self, name: &'static str, text: String) -> Self {
        self.notes.push((name, text));
        self
    }

    /// Begins a step of a model in this way.
    fn begin(
        &mut self,
        slot: ModelSlot,
        begin: impl FnOnce(&mut OpenModel) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        self.current = None;
        begin(self.models.get_mut(&slot).ok_or(BackendError::Absent("the model is not open"))?)?;
        self.current = Some(slot);
        Ok(())
    }

    /// A model's step goes on, if it has one.
    fn resumed(&mut self, slot: ModelSlot, begun: bool) -> Result<(), BackendError> {
        self.current = begun.then_some(slot);
        if begun { Ok(()) } else { Err(BackendError::OutOfOrder("no step of the model has begun")) }
    }

    /// The model whose step is running, and the compute state.
    fn step(&mut self) -> Result<(&mut Compute, &mut OpenModel), BackendError> {
        let model = self.current.and_then(|slot| self.models.get_mut(&slot));
        model.map(|m| (&mut self.compute, m)).ok_or(BackendError::OutOfOrder("no step has begun"))
    }
}

impl Backend for CpuBackend {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            kind: "cpu",
            device: self.device.clone(),
            isa: self.compute.kernels.isa().name().to_owned(),
            threads: self.compute.pool.threads(),
            step_rows: STEP_ROWS,
            sequences: SEQUENCES,
            activations: self.compute.mode,
            kv: self.kv,
            notes: self.notes.clone(),
        }
    }

    fn refuses(&self) -> fn(&Program) -> Option<BackendError> {
        refuses
    }

    fn reads_in_place(&self) -> bool {
        true
    }

    fn load_tensor(&mut self, tensor: &LazyTensor) -> Result<DeviceTensor, BackendError> {
        if !quant::is_supported(tensor.dtype()) {
            let (tensor, dtype) = (tensor.name().to_owned(), tensor.dtype());
            return Err(BackendError::Unsupported { tensor, dtype, backend: "cpu" });
        }
        Ok(DeviceTensor { tensor: tensor.clone(), storage: Storage::InPlace })
    }

    fn open_model(
        &mut self,
        program: &Arc<Program>,
        limits: StepLimits,
        kv_pages: u32,
    ) -> Result<ModelSlot, BackendError> {
        if let Some(refusal) = refuses(program) {
            return Err(refusal);
        }
        let model = OpenModel::open(program, limits, self.kv.within(program), kv_pages, !self.unfused)?;
        let slot = ModelSlot(self.next_slot);
        self.next_slot += 1;
        self.models.insert(slot, model);
        Ok(slot)
    }

    fn close_model(&mut self, slot: ModelSlot) {
        self.models.remove(&slot);
    }

    fn copy_page(&mut self, slot: ModelSlot, from: u32, to: u32) -> Result<(), BackendError> {
        let model = self.models.get_mut(&slot).ok_or(BackendError::Absent("the model is not open"))?;
        model.kv.copy(from, to)
    }

    fn read_page(&mut self, slot: ModelSlot, page: u32) -> Result<Vec<u8>, BackendError> {
        let model = self.models.get_mut(&slot).ok_or(BackendError::Absent("the model is not open"))?;
        model.kv.read(page)
    }

    fn write_page(&mut self, slot: ModelSlot, page: u32, bytes: &[u8]) -> Result<(), BackendError> {
        let model = self.models.get_mut(&slot).ok_or(BackendError::Absent("the model is not open"))?;
        model.kv.fill(page, bytes)
    }

    fn read_state(&mut self, slot: ModelSlot, state: u32) -> Result<Vec<u8>, BackendError> {
        let model = self.models.get(&slot).ok_or(BackendError::Absent("the model is not open"))?;
        model.states.read(state)
    }

    fn write_state(&mut self, slot: ModelSlot, state: u32, bytes: &[u8]) -> Result<(), BackendError> {
        let model = self.models.get_mut(&slot).ok_or(BackendError::Absent("the model is not open"))?;
        model.states.fill(state, bytes)
    }

    fn page_layout(&self) -> &'static str {
        match self.kv {
            KvType::F16 => "cpu f16",
            KvType::Int8 => "cpu int8",
            KvType::F32 => "cpu f32",
        }
    }

    fn release_pages(&mut self, slot: ModelSlot, pages: &[u32]) {
        if let Some(model) = self.models.get_mut(&slot) {
            pages.iter().for_each(|&page| model.kv.release(page));
            model.end_steps();
        }
    }

    fn release_states(&mut self, slot: ModelSlot, states: &[u32]) {
        if let Some(model) = self.models.get_mut(&slot) {
            states.iter().for_each(|&number| model.states.release(number));
            model.end_steps();
        }
    }

    fn row_bytes(&self) -> fn(&Program) -> u64 {
        |program| program.row_bytes(bind::row_bytes)
    }

    fn kv_page_bytes(&self) -> fn(&Program) -> u64 {
        match self.kv {
            KvType::F16 => |program| kv::page_bytes(program.states(), KvType::F16),
            KvType::Int8 => |program| kv::page_bytes(program.states(), KvType::Int8.within(program)),
            KvType::F32 => |program| kv::page_bytes(program.states(), KvType::F32),
        }
    }

    fn kv_bytes(&self, slot: ModelSlot) -> u64 {
        self.models.get(&slot).map_or(0, |model| model.kv.bytes() + model.states.bytes())
    }

    fn begin_step(&mut self, slot: ModelSlot, batch: &StepBatch<'_>) -> Result<(), BackendError> {
        self.begin(slot, |model| model.begin(batch))
    }

    fn begin_beside(&mut self, slot: ModelSlot, batch: &StepBatch<'_>) -> Result<(), BackendError> {
        self.begin(slot, |model| model.begin_beside(batch))
    }

    fn release_values(&mut self, slot: ModelSlot) {
        if let Some(model) = self.models.get_mut(&slot) {
            model.release_values();
        }
    }

    fn resume_step(&mut self, slot: ModelSlot) -> Result<(), BackendError> {
        let begun = self.models.get_mut(&slot).is_some_and(OpenModel::resume);
        self.resumed(slot, begun)
    }

    fn resume_beside(&mut self, slot: ModelSlot) -> Result<(), BackendError> {
        let begun = self.models.get(&slot).is_some_and(OpenModel::is_beside);
        self.resumed(slot, begun)
    }

    fn run(&mut self, part: u32, weights: &Weights<'_>) -> Result<Progress, BackendError> {
        let (compute, model) = self.step()?;
        run::run(compute, model, part, weights)
    }

    fn sample(&mut self, rows: &[SampleRow]) -> Result<Vec<Result<Sampled, BackendError>>, BackendError> {
        let level = self.compute.level;
        let model = self.current.and_then(|slot| self.models.get(&slot));
        let model = model
            .filter(|m| m.now.has_logits)
            .ok_or(BackendError::OutOfOrder("there are no logits to sample from"))?;
        if rows.len() != model.now.step.logits_rows.len() {
            return Err(BackendError::Batch(
                "the number of rows to sample differs from the number of rows with logits",
            ));
        }
        let logits: Vec<&[f32]> = (0..rows.len()).map(|row| model.logits(row)).collect();
        Ok(sample::sample_rows(level, &mut self.compute.pool, &logits, rows, &mut self.samplers))
    }

    fn last_rows(&mut self, rows: Range<u32>) -> Result<Vec<f32>, BackendError> {
        let (_, model) = self.step()?;
        let absent = BackendError::Absent("the step has no such rows of the last layer");
        let layers = model.program.layer_count();
        let done = model.now.at.0 >= layers
            && model
                .bound
                .parts
                .get(layers as usize)
                .is_some_and(|units| model.now.at.0 > layers || model.now.at.1 == units.len());
        let value = model.program.last_rows().and_then(|last| model.bound.place(last.value));
        match value {
            Some(place) if done && rows.end as usize <= model.now.step.rows() => {
                Ok(rows.flat_map(|row| model.now.values.row(place, row as usize)).copied().collect())
            }
            _ => Err(absent),
        }
    }

    fn logits(&mut self, index: usize) -> Result<Vec<f32>, BackendError> {
        let (_, model) = self.step()?;
        if !model.now.has_logits || index >= model.now.step.logits_rows.len() {
            return Err(BackendError::Absent("the row has no logits"));
        }
        Ok(model.logits(index).to_vec())
    }
}
