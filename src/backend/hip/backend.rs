//! A GPU as a [`Backend`].

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::backend::hip::device::wait::{Standstill, Waiter};
use crate::backend::hip::kernels::matmul::planes;
use crate::backend::hip::kernels::thresholds::{Order, SEQUENCES, STEP_ROWS};
use crate::backend::hip::step::addresses::Loads;
use crate::backend::hip::step::graphs::{self, Replays};
use crate::backend::hip::step::model::{self, OpenModel};
use crate::backend::hip::step::{Modes, bind};
use crate::backend::hip::weights::upload::{FileReads, Job, UploadPath, Uploader};
use crate::backend::hip::weights::waits::LoadWaits;
use crate::backend::hip::weights::{MatrixShape, Weight};
use crate::backend::hip::{
    ArenaOptions, CHUNK_BYTES, Device, DeviceOptions, Event, Purpose, Runtime, Stream, StreamPriority,
    device::memory, step::kv, step::states,
};

use crate::backend::{
    ActivationType, Backend, BackendError, BackendInfo, DeviceCounters, DeviceMemory, DeviceMemoryUse,
    DeviceTensor, KvType, ModelSlot, Progress, SampleRow, Sampled, ScratchBytes, StepBatch, StepLimits,
    Storage, Weights,
};
use crate::program::Program;
use crate::tensor::LazyTensor;

/// Options of a GPU backend.
#[derive(Clone, Debug)]
pub struct HipOptions {
    /// Device number.
    pub index: u32,
    /// Element type of activations in products with quantised weights.
    pub activations: ActivationType,
    /// Element type of KV pages.
    pub kv: KvType,
    /// Path of the bytes from files to the device.
    pub upload: UploadPath,
    /// Whether reads go through the page cache.
    pub reads: FileReads,
    /// Threads that read files; 0 for three quarters of the processor's cores, at most 12.
    pub upload_threads: usize,
    /// Most bytes of device memory to take; 0 for no limit.
    pub memory_bytes: u64,
    /// Bytes requested from the driver at once; 0 gives each buffer its own allocation.
    pub chunk_bytes: usize,
    /// Whether steps may be replayed from recorded graphs.
    pub graphs: bool,
    /// Whether a row's bits are the same whatever rows are computed with it.
    pub deterministic: bool,
    /// The device counts as lost after this long without an answer.
    pub patience: Duration,
    /// Root of the kernel's device files: `/`.
    pub root: PathBuf,
    /// Set when the device is lost. Check it before opening the device again.
    pub lost: Arc<OnceLock<BackendError>>,
}

impl Default for HipOptions {
    fn default() -> Self {
        Self {
            index: 0,
            activations: ActivationType::default(),
            kv: KvType::default(),
            upload: UploadPath::default(),
            reads: FileReads::default(),
            upload_threads: 0,
            memory_bytes: 0,
            chunk_bytes: CHUNK_BYTES,
            graphs: true,
            deterministic: false,
            patience: Duration::from_secs(60),
            root: "/".into(),
            lost: Arc::default(),
        }
    }
}

/// A GPU. Weights load on first use; see `upload`.
pub struct HipBackend {
    runtime: Runtime,
    device: Device,
    options: HipOptions,
    modes: Modes,
    // Dropped before `device`: their work may be in flight.
    uploader: Uploader,
    models: HashMap<ModelSlot, OpenModel>,
    stream: Stream,
    waiter: Waiter,
    standstill: Standstill,
    replays: Replays,
    /// Recorded in the compute stream after all work that may still read evicted weights. The next writes to that
    /// memory wait for it.
    retired: Option<Arc<Event>>,
    counts: memory::Counts,
    /// Some weight of the current step was not resident yet.
    waited: Cell<bool>,
    load_waits: RefCell<LoadWaits>,
    /// The model whose step is in progress.
    current: Option<ModelSlot>,
    next_slot: u32,
}

impl HipBackend {
    /// Finds the runtime and opens the device.
    ///
    /// # Errors
    /// [`BackendError::Device`] with what is missing and what to do about it.
    pub fn open(options: HipOptions) -> Result<Self, BackendError> {
        Self::with_runtime(Runtime::find()?, options)
    }

    /// Opens a device of the given runtime.
    ///
    /// # Errors
    /// As [`HipBackend::open`].
    pub fn with_runtime(runtime: Runtime, options: HipOptions) -> Result<Self, BackendError> {
        let limit_bytes = if options.memory_bytes == 0 { u64::MAX } else { options.memory_bytes };
        let arena = ArenaOptions { limit_bytes, chunk_bytes: options.chunk_bytes };
        let opened = DeviceOptions { index: options.index, arena, ..DeviceOptions::default() };
        let device = Device::open(&runtime, &opened)?;
        let stream = device.stream(StreamPriority::High)?;
        let unit = device.unit();
        let order = if options.deterministic { Order::Fixed } else { Order::ByRows };
        Ok(Self {
            uploader: Uploader::start(&device, options.upload, options.reads, options.upload_threads)?,
            models: HashMap::new(),
            waiter: Waiter::new(&device, options.patience)?,
            stream,
            standstill: Standstill::default(),
            replays: Replays { allowed: options.graphs, ..Replays::default() },
            retired: None,
            counts: memory::Counts::of(&device, &options.root),
            waited: Cell::new(false),
            load_waits: RefCell::default(),
            current: None,
            next_slot: 0,
            modes: Modes { activations: options.activations, kv: options.kv, unit, order },
            runtime,
            device,
            options,
        })
    }

    /// The open device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The model whose step is in progress.
    fn step(&mut self) -> Result<&mut OpenModel, BackendError> {
        let model = self.current.and_then(|slot| self.models.get_mut(&slot));
        model.ok_or(BackendError::OutOfOrder("no step has begun"))
    }

    fn current_model(&self) -> Result<&OpenModel, BackendError> {
        let model = self.current.and_then(|slot| self.models.get(&slot));
        model.ok_or(BackendError::OutOfOrder("no step has begun"))
    }

    /// Copies the logits of a row to the host. The device must be done.
    fn copy_logits(&self, model: &OpenModel, index: usize) -> Result<Vec<f32>, BackendError> {
        let vocab = model.program.vocab();
        let mut logits = vec![0f32; vocab];
        let range = model.logits()?.range(index * vocab * 4, vocab * 4)?;
        self.stream.download(range, logits.as_mut_slice())?;
        Ok(logits)
    }

    /// Runs the remaining units of the current part.
    fn go_on(&mut self, weights: &Weights<'_>) -> Result<Progress, BackendError> {
        let Self { device, stream, options, uploader, waiter, waited, load_waits, .. } = self;
        let model = self.current.and_then(|slot| self.models.get_mut(&slot));
        let model = model.ok_or(BackendError::OutOfOrder("no step has begun"))?;
        while model.unit().is_some() {
            let patience = options.patience;
            let loads = Loads { device, stream, uploader, waiter, patience, waited, waits: load_waits };
            model.look_up(&loads, weights)?;
            load_waits.get_mut().leave(stream)?;
            model.advance(device, stream)?;
            if model.lacks_chosen() {
                waiter.wait_for_device(device, stream)?;
                waiter.set_busy();
                let missing = model.missing(stream, weights)?;
                if !missing.is_empty() {
                    return Ok(Progress::Needs(missing));
                }
            }
        }
        Ok(Progress::Done)
    }

    /// The context in which units wait for loads.
    fn loads(&self) -> Loads<'_> {
        Loads {
            device: &self.device,
            stream: &self.stream,
            uploader: &self.uploader,
            waiter: &self.waiter,
            patience: self.options.patience,
            waited: &self.waited,
            waits: &self.load_waits,
        }
    }

    /// Launches or replays a step that was deferred until all of it is known.
    fn flush(&mut self) -> Result<(), BackendError> {
        let (device, stream) = (&self.device, &self.stream);
        match self.current.and_then(|slot| self.models.get_mut(&slot)) {
            Some(model) if model.step.deferred => {
                graphs::run(model, device, stream, &mut self.waiter, &mut self.replays)
            }
            _ => Ok(()),
        }
    }

    /// Whether a row of the step, which was launched unchecked, chose an expert that is not resident. Starts the step again
    /// then.
    fn lacked(&mut self) -> Result<bool, BackendError> {
        self.wait_for_device()?;
        let Some(model) = self.current.and_then(|slot| self.models.get_mut(&slot)) else { return Ok(false) };
        let lacked = model.lacked(&self.stream)?;
        if lacked {
            model.start_again(&self.stream)?;
            self.replays.repeats += 1;
            self.waiter.set_busy();
        }
        Ok(lacked)
    }

    /// Waits until all launched work is done.
    fn wait_for_device(&mut self) -> Result<(), BackendError> {
        self.waiter.wait_for_device(&self.device, &self.stream)
    }
}

/// Names what no GPU computes of a program.
pub fn refuses(program: &Program) -> Option<BackendError> {
    bind::refuse(program)
}

impl Backend for HipBackend {
    fn info(&self) -> BackendInfo {
        let device = self.device.description();
        let version = self.runtime.version();
        let (major, minor) = (version / 10_000_000, version / 100_000 % 100);
        let fixed =
            (self.modes.order == Order::Fixed).then(|| ("deterministic", "one order of sums".to_owned()));
        BackendInfo {
            kind: "hip",
            device: device.name.clone(),
            isa: device.arch.clone(),
            threads: 0,
            step_rows: STEP_ROWS,
            sequences: SEQUENCES,
            activations: self.options.activations,
            kv: self.options.kv,
            notes: [
                ("runtime", format!("{} {major}.{minor}", self.runtime.path().display())),
                ("code", self.device.code().to_owned()),
                ("memory", format!("{} MiB", device.memory_bytes >> 20)),
            ]
            .into_iter()
            .chain(fixed)
            .collect(),
        }
    }

    fn refuses(&self) -> fn(&Program) -> Option<BackendError> {
        refuses
    }

    fn load_tensor(&mut self, tensor: &LazyTensor) -> Result<DeviceTensor, BackendError> {
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        let unsupported =
            || BackendError::Unsupported { tensor: tensor.name().to_owned(), dtype, backend: "hip" };
        let planes = planes::planes(dtype, shape.rows(), shape.cols()).ok_or_else(unsupported)?;
        let (Ok(rows), Ok(cols)) = (u32::try_from(shape.rows()), u32::try_from(shape.cols())) else {
            return Err(unsupported());
        };
        let bytes = usize::try_from(planes.bytes).map_err(|_| unsupported())?;
        self.load_waits.get_mut().enter(&self.device, &self.stream)?;
        let buffer = self.device.take(bytes, Purpose::Weights)?;
        let weight = Arc::new(Weight::new(tensor.name(), MatrixShape { dtype, rows, cols }, buffer));
        self.uploader.submit(Job::new(tensor, Arc::clone(&weight), self.retired.clone())?);
        Ok(DeviceTensor { tensor: tensor.clone(), storage: Storage::Device(weight) })
    }

    fn retire(&mut self) -> Result<(), BackendError> {
        let (device, stream) = (&self.device, &self.stream);
        if let Some(model) = self.current.and_then(|slot| self.models.get_mut(&slot)) {
            // A deferred step is launched directly from here on.
            model.launch_deferred(device, stream)?;
        }
        let event = device.event(false)?;
        stream.record(&event)?;
        self.retired = Some(Arc::new(event));
        Ok(())
    }

    fn until_decided(&mut self, load: &Arc<dyn DeviceMemory>) -> Result<(), BackendError> {
        self.loads().decided(load)
    }

    fn watch_loads(&mut self, under_way: bool) -> Result<(), BackendError> {
        if !under_way {
            self.standstill = Standstill::default();
            return Ok(());
        }
        let bytes = self.uploader.counts().read().1;
        let stood = self.standstill.since(bytes, Instant::now());
        if stood > self.options.patience { Err(self.loads().late()) } else { Ok(()) }
    }

    fn weight_bytes(&self) -> fn(&LazyTensor) -> u64 {
        memory::weight_bytes
    }

    fn scratch_bytes(&self) -> ScratchBytes {
        let modes = self.modes;
        ScratchBytes::of(move |program, limits| model::scratch_bytes(program, limits, modes))
    }

    fn memory(&self) -> DeviceMemoryUse {
        let graphs = self.models.values().map(|model| model.graphs.bytes()).sum();
        memory::in_use(&self.device, self.options.memory_bytes, &self.counts, graphs)
    }

    fn set_heartbeat(&mut self, heartbeat: Arc<AtomicU64>) {
        self.waiter.set_heartbeat(heartbeat);
    }

    fn trim(&mut self) {
        self.device.arena().trim();
    }

    fn parts_ahead(&self) -> usize {
        2
    }

    fn counters(&self) -> DeviceCounters {
        let (uploads, upload_bytes, upload_failures) = self.uploader.counts().read();
        let used_bytes = self.device.ledger().used_bytes;
        DeviceCounters {
            uploads,
            upload_bytes,
            upload_failures,
            upload_rates: self.uploader.rates(),
            graph_replays: self.replays.replays,
            graphs: self.replays.graphs,
            graphs_refused: self.replays.refused,
            steps_repeated: self.replays.repeats,
            used_bytes,
        }
    }

    fn open_model(
        &mut self,
        program: &Arc<Program>,
        limits: StepLimits,
        kv_pages: u32,
    ) -> Result<ModelSlot, BackendError> {
        let how = (limits, self.modes);
        let model = OpenModel::open(&self.device, &self.stream, program, how, kv_pages)?;
        let slot = ModelSlot(self.next_slot);
        self.next_slot += 1;
        self.models.insert(slot, model);
        Ok(slot)
    }

    fn close_model(&mut self, slot: ModelSlot) {
        if let Err(error) = self.wait_for_device() {
            tracing::warn!(%error, "the device failed before this model was closed");
        }
        self.models.remove(&slot);
        if self.current.is_some() {
            self.waiter.set_busy(); // a step is in progress and continues
        }
    }

    fn copy_page(&mut self, slot: ModelSlot, from: u32, to: u32) -> Result<(), BackendError> {
        let model = self.models.get_mut(&slot).ok_or(BackendError::Absent("the model is not open"))?;
        // In order with the steps before and after it.
        model.kv.copy(&self.device, &self.stream, from, to)?;
        self.waiter.set_busy();
        Ok(())
    }

    fn read_page(&mut self, slot: ModelSlot, page: u32) -> Result<Vec<u8>, BackendError> {
        self.wait_for_device()?;
        let model = self.models.get(&slot).ok_or(BackendError::Absent("the model is not open"))?;
        model.kv.read(&self.stream, page)
    }

    fn write_page(&mut self, slot: ModelSlot, page: u32, bytes: &[u8]) -> Result<(), BackendError> {
        let model = self.models.get_mut(&slot).ok_or(BackendError::Absent("the model is not open"))?;
        model.kv.fill(&self.device, &self.stream, page, bytes)
    }

    fn read_state(&mut self, slot: ModelSlot, state: u32) -> Result<Vec<u8>, BackendError> {
        self.wait_for_device()?;
        let model = self.models.get(&slot).ok_or(BackendError::Absent("the model is not open"))?;
        model.states.read(&self.stream, state)
    }

    fn write_state(&mut self, slot: ModelSlot, state: u32, bytes: &[u8]) -> Result<(), BackendError> {
        let model = self.models.get_mut(&slot).ok_or(BackendError::Absent("the model is not open"))?;
        model.states.fill(&self.device, &self.stream, state, bytes)
    }

    fn page_layout(&self) -> &'static str {
        match self.options.kv {
            KvType::F16 => "gpu f16",
            KvType::Int8 => "gpu int8",
            KvType::F32 => "gpu f32",
        }
    }

    fn release_pages(&mut self, slot: ModelSlot, pages: &[u32]) {
        if let Err(error) = self.wait_for_device() {
            tracing::warn!(%error, "the device failed before these KV pages were freed");
        }
        if let Some(model) = self.models.get_mut(&slot) {
            pages.iter().for_each(|&page| model.kv.release(page));
            // Its rows may attend to a page that is freed now.
            model.step.clear();
        }
    }

    fn release_states(&mut self, slot: ModelSlot, states: &[u32]) {
        if let Err(error) = self.wait_for_device() {
            tracing::warn!(%error, "the device failed before these recurrent states were freed");
        }
        if let Some(model) = self.models.get_mut(&slot) {
            states.iter().for_each(|&number| model.states.release(number));
            // It may read a state that is freed now.
            model.step.clear();
        }
    }

    fn recurrent_bytes(&self) -> fn(&Program) -> u64 {
        states::array_bytes
    }

    fn kv_page_bytes(&self) -> fn(&Program) -> u64 {
        match self.options.kv {
            KvType::F16 => |program| kv::page_bytes(program, KvType::F16),
            KvType::Int8 => |program| kv::page_bytes(program, KvType::Int8),
            KvType::F32 => |program| kv::page_bytes(program, KvType::F32),
        }
    }

    fn kv_bytes_max(&self) -> Option<u64> {
        Some(self.device.description().memory_bytes / 2)
    }

    fn kv_bytes(&self, slot: ModelSlot) -> u64 {
        self.models.get(&slot).map_or(0, |model| model.kv.bytes() + model.states.bytes())
    }

    fn open_bytes(&self, slot: ModelSlot) -> u64 {
        self.models.get(&slot).map_or(0, |model| model::open_bytes(&model.bound, &model.program))
    }

    fn begin_step(&mut self, slot: ModelSlot, batch: &StepBatch<'_>) -> Result<(), BackendError> {
        self.current = None;
        self.wait_for_device()?; // the new step overwrites the last step's arrays
        let model = self.models.get_mut(&slot).ok_or(BackendError::Absent("the model is not open"))?;
        model.begin(&self.device, &self.stream, batch, self.replays.allowed)?;
        self.waited.set(false);
        self.load_waits.get_mut().begin();
        self.waiter.set_busy();
        self.current = Some(slot);
        Ok(())
    }

    fn suspend_step(&mut self) -> Result<(), BackendError> {
        let (device, stream) = (&self.device, &self.stream);
        let model = self.current.and_then(|slot| self.models.get_mut(&slot));
        // Weights that a deferred launch reads could be evicted before the step goes on.
        model.map_or(Ok(()), |model| model.launch_deferred(device, stream))
    }

    fn resume_step(&mut self, slot: ModelSlot) -> Result<(), BackendError> {
        let begun = self.models.get(&slot).is_some_and(|model| model.step.begun);
        self.current = begun.then_some(slot);
        if !begun {
            return Err(BackendError::OutOfOrder("no step of the model has begun"));
        }
        // Its loads' times were those of another step since: it counts as one that waited.
        self.waited.set(true);
        self.load_waits.get_mut().begin();
        self.waiter.set_busy();
        Ok(())
    }

    fn run(&mut self, part: u32, weights: &Weights<'_>) -> Result<Progress, BackendError> {
        let (device, stream) = (&self.device, &self.stream);
        let model = self.current.and_then(|slot| self.models.get_mut(&slot));
        let model = model.ok_or(BackendError::OutOfOrder("no step has begun"))?;
        model.enter(device, stream, part, weights)?;
        if let Progress::Needs(missing) = self.go_on(weights)? {
            return Ok(Progress::Needs(missing));
        }
        let warm = !self.waited.get();
        let model = self.step()?;
        (model.step.part, model.step.unit) = (part + 1, 0);
        if part == model.program.head_part() {
            self.flush()?;
            if self.step()?.may_lack() && self.lacked()? {
                return Ok(Progress::Again);
            }
            let model = self.step()?;
            model.warm = warm;
            model.step.has_logits = true;
        }
        Ok(Progress::Done)
    }

    fn sample(&mut self, rows: &[SampleRow]) -> Result<Vec<Result<Sampled, BackendError>>, BackendError> {
        let model = self.current.and_then(|slot| self.models.get_mut(&slot)).filter(|m| m.step.has_logits);
        let model = model.ok_or(BackendError::OutOfOrder("there are no logits to sample from"))?;
        if rows.len() != model.step.logits_rows {
            return Err(BackendError::Batch(
                "the number of rows to sample differs from the number of rows with logits",
            ));
        }
        let logits = model.logits()?.ptr();
        self.waiter.set_busy(); // `wait_for_device` may have run for the step already
        model.sampler.launch(&self.device, &self.stream, logits, rows)?;
        self.waiter.wait_for_device(&self.device, &self.stream)?;
        let model = self.current_model()?;
        Ok(model.sampler.read(rows, |index| self.copy_logits(model, index)))
    }

    fn finish_step(&mut self) -> Result<(), BackendError> {
        self.wait_for_device()
    }

    fn load_wait(&mut self) -> Result<Duration, BackendError> {
        if self.load_waits.get_mut().any() {
            self.wait_for_device()?;
        }
        Ok(self.load_waits.get_mut().end()?)
    }

    fn last_rows(&mut self, rows: Range<u32>) -> Result<Vec<f32>, BackendError> {
        let absent = BackendError::Absent("the step has no such rows of the last layer");
        let model = self.step()?;
        let done =
            model.step.part >= model.program.head_part() && rows.end as usize <= model.step.token_ids.len();
        if !done || model.step.deferred {
            return Err(absent);
        }
        self.wait_for_device()?;
        self.current_model()?.last_rows(&self.stream, rows)?.ok_or(absent)
    }

    fn logits(&mut self, index: usize) -> Result<Vec<f32>, BackendError> {
        let model = self.step()?;
        if !model.step.has_logits || index >= model.step.logits_rows {
            return Err(BackendError::Absent("the row has no logits"));
        }
        self.wait_for_device()?;
        self.copy_logits(self.current_model()?, index)
    }
}

impl Drop for HipBackend {
    fn drop(&mut self) {
        // After this, memory that submitted work uses returns to the driver.
        if let Err(error) = self.wait_for_device() {
            tracing::debug!(%error, "the device failed before it was closed");
        }
        if let Err(error) = self.device.alive() {
            let _ = self.options.lost.set(error.into()); // only the first reason is kept
        }
    }
}
