//! A GPU as a [`Backend`].

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::graphs::{self, Replays};
use super::kernels::matmul::{choice, planes};
use super::model::{self, Model, Modes};
use super::run::{Op, embed_kernel};
use super::upload::{FileReads, Job, UploadPath, Uploader};
use super::wait::{Standstill, Waiter};
use super::waits::LoadWaits;
use super::weights::{Form, Weight};
use super::{
    ArenaOptions, CHUNK_BYTES, Device, DeviceOptions, Event, Owner, Runtime, Stream, StreamPriority, kv,
    memory,
};

use crate::backend::{
    Activations, AttentionInput, Backend, BackendError, BackendInfo, DeviceCounters, DeviceMemory,
    DeviceMemoryUse, DeviceTensor, Experts, FfnInput, KvType, ModelDims, ModelSlot, Projection, Router,
    SampleRow, Sampled, StepBatch, Storage,
};
use crate::tensor::{DType, LazyTensor};

mod operands;

/// Up to here four times as many rows take far less than four times as long (products of an 8B model on an H200: 30 ms for 256 rows,
/// 53 for 1024), and answers that decode beside such a step wait for a tenth of a second.
const STEP_ROWS: usize = 1024;

/// How a GPU computes.
#[derive(Clone, Debug)]
pub struct HipOptions {
    /// Which device.
    pub index: u32,
    /// What quantised weights meet.
    pub activations: Activations,
    /// Element type of KV pages.
    pub kv: KvType,
    /// How bytes get from files to the device.
    pub upload: UploadPath,
    /// How they are read.
    pub reads: FileReads,
    /// Threads that read files for it; 0 for three quarters of the processor's cores and at most 12.
    pub upload_threads: usize,
    /// Most bytes of device memory to take; 0 for all there are.
    pub memory_bytes: u64,
    /// Bytes asked of the driver at once; 0 for each buffer by itself.
    pub chunk_bytes: usize,
    /// Whether steps may be replayed from recorded graphs.
    pub graphs: bool,
    /// A device that does not answer for this long counts as lost.
    pub patience: Duration,
    /// Where the kernel's files about devices lie: `/`.
    pub root: PathBuf,
    /// Set when the device is lost: whoever would open it again asks here first.
    pub lost: Arc<OnceLock<BackendError>>,
}

impl Default for HipOptions {
    fn default() -> Self {
        Self {
            index: 0,
            activations: Activations::default(),
            kv: KvType::default(),
            upload: UploadPath::default(),
            reads: FileReads::default(),
            upload_threads: 0,
            memory_bytes: 0,
            chunk_bytes: CHUNK_BYTES,
            graphs: true,
            patience: Duration::from_secs(60),
            root: "/".into(),
            lost: Arc::default(),
        }
    }
}

/// A GPU. Weights arrive when they are first asked for; see `upload`.
pub struct HipBackend {
    runtime: Runtime,
    device: Device,
    options: HipOptions,
    modes: Modes,
    // Before `device` in the order of dropping are those whose work may be under way.
    uploader: Uploader,
    models: HashMap<ModelSlot, Model>,
    stream: Stream,
    waiter: Waiter,
    standstill: Standstill,
    replays: Replays,
    /// Stands in the compute stream behind all that may still read memory of weights that left. What is written there next
    /// is written behind it.
    retired: Option<Arc<Event>>,
    counts: memory::Counts,
    /// A weight of the step at hand was not there yet.
    waited: Cell<bool>,
    load_waits: RefCell<LoadWaits>,
    /// Whose step is under way.
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

    /// Opens a device of this runtime.
    ///
    /// # Errors
    /// As [`HipBackend::open`].
    pub fn with_runtime(runtime: Runtime, options: HipOptions) -> Result<Self, BackendError> {
        let limit_bytes = if options.memory_bytes == 0 { u64::MAX } else { options.memory_bytes };
        let arena = ArenaOptions { limit_bytes, chunk_bytes: options.chunk_bytes };
        let opened = DeviceOptions { index: options.index, arena, ..DeviceOptions::default() };
        let device = Device::open(&runtime, &opened)?;
        let stream = device.stream(StreamPriority::High)?;
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
            modes: Modes { activations: options.activations, kv: options.kv },
            runtime,
            device,
            options,
        })
    }

    /// The device underneath.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The model whose step is under way.
    fn step(&mut self) -> Result<&mut Model, BackendError> {
        let model = self.current.and_then(|slot| self.models.get_mut(&slot));
        model.ok_or(BackendError::Batch("no step was begun"))
    }

    /// Adds an operation to the step, and launches the one before it.
    fn push(&mut self, op: Op) -> Result<(), BackendError> {
        let (device, stream, modes) = (&self.device, &self.stream, self.modes);
        self.load_waits.get_mut().leave(stream)?;
        let model = self.current.and_then(|slot| self.models.get_mut(&slot));
        let model = model.ok_or(BackendError::Batch("no step was begun"))?;
        model.step.ops.push(op);
        if model.step.deferred {
            return Ok(());
        }
        let known = model.step.ops.len() - 1;
        launch(model, device, stream, modes, known)
    }

    /// Launches what is left of the step, or replays it.
    fn flush(&mut self) -> Result<(), BackendError> {
        let (device, stream, modes) = (&self.device, &self.stream, self.modes);
        let Some(model) = self.current.and_then(|slot| self.models.get_mut(&slot)) else { return Ok(()) };
        if model.step.deferred {
            return graphs::run(model, modes, device, stream, &mut self.waiter, &mut self.replays);
        }
        let known = model.step.ops.len();
        launch(model, device, stream, modes, known)
    }

    /// Waits until all that was launched is done.
    fn settle(&mut self) -> Result<(), BackendError> {
        self.waiter.settle(&self.device, &self.stream)
    }
}

/// Launches operations of a step up to number `known`: of the last one it has to be known what follows, or that nothing does.
fn launch(
    model: &mut Model,
    device: &Device,
    stream: &Stream,
    modes: Modes,
    known: usize,
) -> Result<(), BackendError> {
    if model.step.launched >= known {
        return Ok(());
    }
    if model.step.launched == 0 {
        model.arrays.send(stream)?;
        model.kv.send_table(device, stream)?;
    }
    let run = model.run(device, stream, modes)?;
    for index in model.step.launched..known {
        if let Some(op) = model.step.ops.get(index) {
            run.launch(op, model.step.ops.get(index + 1))?;
        }
    }
    model.step.launched = known;
    Ok(())
}

fn check_layer(dims: &ModelDims, layer: u32) -> Result<(), BackendError> {
    let known = (layer as usize) < dims.n_layers;
    known.then_some(()).ok_or(BackendError::Batch("a layer the model does not have"))
}

impl Backend for HipBackend {
    fn info(&self) -> BackendInfo {
        let device = self.device.description();
        let version = self.runtime.version();
        let (major, minor) = (version / 10_000_000, version / 100_000 % 100);
        BackendInfo {
            kind: "hip",
            device: device.name.clone(),
            isa: device.arch.clone(),
            threads: 0,
            step_rows: STEP_ROWS,
            activations: self.options.activations,
            kv: self.options.kv,
            notes: vec![
                ("runtime", format!("{} {major}.{minor}", self.runtime.path().display())),
                ("code", self.device.code().to_owned()),
                ("memory", format!("{} MiB", device.memory_bytes >> 20)),
            ],
        }
    }

    fn supports(&self, dtype: DType) -> bool {
        choice::gemv_f32(dtype, 1).is_some() && embed_kernel(dtype).is_some()
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
        let buffer = self.device.take(bytes, Owner::Weights)?;
        let weight = Arc::new(Weight::new(tensor.name(), Form { dtype, rows, cols }, buffer));
        self.uploader.submit(Job::new(tensor, Arc::clone(&weight), self.retired.clone())?);
        Ok(DeviceTensor { tensor: tensor.clone(), storage: Storage::Device(weight) })
    }

    fn load_table(&mut self, tensor: &LazyTensor) -> Result<DeviceTensor, BackendError> {
        if embed_kernel(tensor.dtype()).is_none() {
            let (tensor, dtype) = (tensor.name().to_owned(), tensor.dtype());
            return Err(BackendError::Unsupported { tensor, dtype, backend: "hip" });
        }
        // A step takes a few of its rows: they travel with the step's numbers.
        Ok(DeviceTensor { tensor: tensor.clone(), storage: Storage::InPlace })
    }

    fn retire(&mut self) -> Result<(), BackendError> {
        let (device, stream, modes) = (&self.device, &self.stream, self.modes);
        if let Some(model) = self.current.and_then(|slot| self.models.get_mut(&slot)) {
            // A step that was to be replayed at its end is launched as it goes from here on.
            model.step.deferred = false;
            let known = model.step.ops.len().saturating_sub(1); // of the last one it is not known what follows
            launch(model, device, stream, modes, known)?;
        }
        let event = device.event(false)?;
        stream.record(&event)?;
        self.retired = Some(Arc::new(event));
        Ok(())
    }

    fn until_decided(&mut self, load: &Arc<dyn DeviceMemory>) -> Result<(), BackendError> {
        self.upload_decided(load)
    }

    fn watch_loads(&mut self, under_way: bool) -> Result<(), BackendError> {
        if !under_way {
            self.standstill = Standstill::default();
            return Ok(());
        }
        let bytes = self.uploader.counts().read().1;
        let stood = self.standstill.since(bytes, Instant::now());
        if stood > self.options.patience { Err(self.late_upload()) } else { Ok(()) }
    }

    fn weight_bytes(&self) -> fn(&LazyTensor) -> u64 {
        memory::weight_bytes
    }

    fn scratch_bytes(&self) -> fn(&ModelDims) -> u64 {
        model::scratch_bytes
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

    fn layers_ahead(&self) -> usize {
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
            used_bytes,
        }
    }

    fn open_model(&mut self, dims: &ModelDims, kv_pages: u32) -> Result<ModelSlot, BackendError> {
        let model = Model::open(&self.device, &self.stream, dims, self.options.kv, kv_pages)?;
        let slot = ModelSlot(self.next_slot);
        self.next_slot += 1;
        self.models.insert(slot, model);
        Ok(slot)
    }

    fn close_model(&mut self, slot: ModelSlot) {
        if let Err(error) = self.settle() {
            tracing::warn!(%error, "a model is closed over work that did not end well");
        }
        self.models.remove(&slot);
        if self.current.is_some() {
            self.waiter.set_busy(); // a step is under way, and goes on
        }
    }

    fn release_pages(&mut self, slot: ModelSlot, pages: &[u32]) {
        if let Err(error) = self.settle() {
            tracing::warn!(%error, "pages are given back over work that did not end well");
        }
        if let Some(model) = self.models.get_mut(&slot) {
            pages.iter().for_each(|&page| model.kv.release(page));
            // Its rows may attend to a page that is gone now.
            model.step.clear();
        }
    }

    fn kv_page_bytes(&self) -> fn(&ModelDims) -> u64 {
        match self.options.kv {
            KvType::F16 => |dims| kv::page_bytes(dims, KvType::F16),
            KvType::F32 => |dims| kv::page_bytes(dims, KvType::F32),
        }
    }

    fn kv_bytes_max(&self) -> Option<u64> {
        Some(self.device.description().memory_bytes / 2)
    }

    fn kv_bytes(&self, slot: ModelSlot) -> u64 {
        self.models.get(&slot).map_or(0, |model| model.kv.bytes())
    }

    fn begin_step(&mut self, slot: ModelSlot, batch: &StepBatch<'_>) -> Result<(), BackendError> {
        self.current = None;
        self.settle()?; // the last step's arrays are written over
        let model = self.models.get_mut(&slot).ok_or(BackendError::Batch("a model that is not open"))?;
        model.begin(&self.device, &self.stream, batch, self.replays.allowed)?;
        self.waited.set(false);
        self.load_waits.get_mut().begin();
        self.waiter.set_busy();
        self.current = Some(slot);
        Ok(())
    }

    fn embed(&mut self, table: &DeviceTensor) -> Result<(), BackendError> {
        let model = self.step()?;
        table.want(model.dims.vocab, model.dims.hidden)?;
        let bytes = table.tensor.bytes();
        let row_bytes = bytes.len() / model.dims.vocab;
        model.arrays.set_embedding_bytes(row_bytes);
        for (row, &id) in model.step.token_ids.iter().enumerate() {
            let start = id as usize * row_bytes;
            model.arrays.set_embedding(row, bytes.get(start..start + row_bytes).unwrap_or_default());
        }
        let dtype = table.dtype();
        self.push(Op::Begin { dtype })
    }

    fn attention_input(&mut self, layer: u32, weights: &AttentionInput<'_>) -> Result<(), BackendError> {
        let dims = &self.step()?.dims;
        check_layer(dims, layer)?;
        let (hidden, head) = (dims.hidden, dims.head_dim);
        let (q_rows, kv_rows) = (dims.n_heads * head, dims.n_kv_heads * head);
        let norm = self.vector(weights.norm, hidden)?;
        let parts = [
            self.matrix(&weights.q, q_rows, hidden)?,
            self.matrix(&weights.k, kv_rows, hidden)?,
            self.matrix(&weights.v, kv_rows, hidden)?,
        ];
        let (q_norm, k_norm) = (self.optional(weights.q_norm, head)?, self.optional(weights.k_norm, head)?);
        let angles = self.angles(weights.rope_factors)?;
        self.push(Op::AttentionInput { layer, norm, parts, q_norm, k_norm, angles })
    }

    fn attention(&mut self, layer: u32) -> Result<(), BackendError> {
        check_layer(&self.step()?.dims, layer)?;
        self.push(Op::Attention { layer })
    }

    fn attention_output(&mut self, weights: &Projection<'_>) -> Result<(), BackendError> {
        let dims = &self.step()?.dims;
        let (rows, cols) = (dims.hidden, dims.n_heads * dims.head_dim);
        let matrix = self.matrix(weights, rows, cols)?;
        self.push(Op::AttentionOutput { matrix })
    }

    fn ffn_input(&mut self, weights: &FfnInput<'_>) -> Result<(), BackendError> {
        let dims = &self.step()?.dims;
        let (hidden, most) = (dims.hidden, dims.ffn);
        let cols = weights.gate.weight.rows();
        if cols > most {
            weights.gate.weight.want(most, hidden)?;
        }
        let norm = self.vector(weights.norm, hidden)?;
        let gate = self.matrix(&weights.gate, cols, hidden)?;
        let up = self.matrix(&weights.up, cols, hidden)?;
        self.push(Op::FfnInput { norm, gate, up })
    }

    fn ffn_output(&mut self, weights: &Projection<'_>) -> Result<(), BackendError> {
        let model = self.step()?;
        let Some(Op::FfnInput { gate, .. }) = model.step.ops.last() else {
            return Err(BackendError::Batch("a down projection without its input"));
        };
        let (rows, cols) = (model.dims.hidden, gate.rows as usize);
        let matrix = self.matrix(weights, rows, cols)?;
        self.push(Op::FfnOutput { matrix })
    }

    fn route(&mut self, layer: u32, weights: &Router<'_>) -> Result<(), BackendError> {
        let dims = &self.step()?.dims;
        check_layer(dims, layer)?;
        let experts = dims.experts.as_ref().ok_or(BackendError::Batch("experts of a model that has none"))?;
        let (hidden, count) = (dims.hidden, experts.count);
        let norm = self.vector(weights.norm, hidden)?;
        let router = self.matrix(&weights.logits, count, hidden)?;
        self.push(Op::Route { norm, router })
    }

    fn routed(&mut self) -> Result<Vec<u32>, BackendError> {
        // What follows depends on the answer: the step is launched as it goes from here on.
        self.step()?.step.deferred = false;
        self.flush()?;
        self.settle()?;
        self.waiter.set_busy();
        let model = self.current.and_then(|slot| self.models.get(&slot));
        let model = model.ok_or(BackendError::Batch("no step was begun"))?;
        let used = model.dims.experts.as_ref().map_or(0, |experts| experts.used);
        let (rows, own) = (model.arrays.layout().rows, model.step.token_ids.len());
        let mut chosen = vec![0u32; rows * used];
        let range = model.scratch.routing()?.chosen.range(0, chosen.len() * 4)?;
        self.stream.download(range, chosen.as_mut_slice())?;
        if rows > own {
            // Rows that only fill the step up hold anything: they go where the first row goes, whose experts are loaded.
            let (tokens, filling) = chosen.split_at_mut(own * used);
            filling.chunks_exact_mut(used).for_each(|row| row.copy_from_slice(&tokens[..used]));
            self.stream.upload(range, chosen.as_slice())?;
        }
        chosen.truncate(own * used);
        chosen.sort_unstable();
        chosen.dedup();
        Ok(chosen)
    }

    fn experts(&mut self, layer: u32, experts: &Experts<'_>) -> Result<(), BackendError> {
        let Some(Op::Route { norm, .. }) = self.step()?.step.ops.last().copied() else {
            return Err(BackendError::Batch("experts without their choice"));
        };
        let parts = self.expert_parts(layer, experts)?;
        let dims = &self.step()?.dims;
        let sizes = dims.experts.as_ref().map(|e| (e.ffn as u32, dims.hidden as u32));
        let [gate, up, down] = parts.map(|part| (part.rows, part.cols));
        if sizes.is_none_or(|(ffn, hidden)| [gate, up, down] != [(ffn, hidden), (ffn, hidden), (hidden, ffn)])
        {
            return Err(BackendError::Dims("experts of another size than the model's"));
        }
        self.push(Op::Experts { norm, parts })
    }

    fn head(&mut self, norm: &DeviceTensor, output: &DeviceTensor) -> Result<(), BackendError> {
        let dims = &self.step()?.dims;
        let (hidden, vocab) = (dims.hidden, dims.vocab);
        let norm = self.vector(norm, hidden)?;
        let matrix = self.matrix(&Projection { weight: output, bias: None }, vocab, hidden)?;
        self.push(Op::Head { norm, matrix })?;
        self.flush()?;
        let warm = !self.waited.get();
        let model = self.step()?;
        model.warm = warm;
        model.step.has_logits = true;
        Ok(())
    }

    fn sample(&mut self, rows: &[SampleRow]) -> Result<Vec<Result<Sampled, BackendError>>, BackendError> {
        let model = self.current.and_then(|slot| self.models.get_mut(&slot)).filter(|m| m.step.has_logits);
        let model = model.ok_or(BackendError::Batch("no logits to draw from"))?;
        if rows.len() != model.step.logits_rows {
            return Err(BackendError::Batch("rows to draw differ in number from rows with logits"));
        }
        let logits = model.scratch.logits.ptr();
        self.waiter.set_busy(); // the step itself may have been waited for already
        model.sampler.launch(&self.device, &self.stream, logits, rows)?;
        self.waiter.settle(&self.device, &self.stream)?;
        Ok(self.step()?.sampler.read(rows))
    }

    fn load_wait(&mut self) -> Result<Duration, BackendError> {
        if self.load_waits.get_mut().any() {
            self.settle()?;
        }
        Ok(self.load_waits.get_mut().end()?)
    }

    fn logits(&mut self, index: usize) -> Result<Vec<f32>, BackendError> {
        let model = self.step()?;
        if !model.step.has_logits || index >= model.step.logits_rows {
            return Err(BackendError::Batch("a row without logits"));
        }
        self.settle()?;
        let (device_stream, slot) = (&self.stream, self.current);
        let model = slot.and_then(|slot| self.models.get(&slot));
        let model = model.ok_or(BackendError::Batch("no step was begun"))?;
        let vocab = model.dims.vocab;
        let mut logits = vec![0f32; vocab];
        let range = model.scratch.logits.range(index * vocab * 4, vocab * 4)?;
        device_stream.download(range, logits.as_mut_slice())?;
        Ok(logits)
    }
}

impl Drop for HipBackend {
    fn drop(&mut self) {
        // Memory that submitted work uses goes back to the driver after this.
        if let Err(error) = self.settle() {
            tracing::debug!(%error, "the device is closed over work that did not end well");
        }
        if let Err(error) = self.device.alive() {
            let _ = self.options.lost.set(error.into()); // the first reason holds
        }
    }
}
