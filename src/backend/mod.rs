//! The interface of a device: it binds programs and runs their parts.
//!
//! [`Backend::open_model`] binds a program: the backend chooses a kernel for each stretch of operations and places
//! values in memory. A step takes `rows` token rows of several sequences of one model through the parts:
//! `begin_step`, `run` for each part, then `sample` or `logits`. The backend owns values, KV pages and scratch. The
//! caller names rows, positions and pages by number only, so that all of them can lie on a device.

pub mod chain;
mod checks;
mod closed;
pub mod cpu;
pub mod doctor;
mod error;
pub mod hip;
mod types;

pub use chain::Chain;
pub use closed::Closed;
pub use error::{BackendError, Cause, Shortage, cause};
pub use types::*;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::program::Program;
use crate::tensor::LazyTensor;

/// The values of a tensor, decoded on the host. Reads the mapped file: the caller may wait for its disk.
///
/// # Errors
/// [`BackendError::Internal`] for a type that no backend computes with.
pub fn host_values(tensor: &LazyTensor) -> Result<Vec<f32>, BackendError> {
    let mut values = Vec::new();
    cpu::append_values(tensor, &mut values)?;
    Ok(values)
}

/// A device that runs steps. One engine thread owns it; no other thread calls its methods.
///
/// Rows of one step never influence each other's bits, whatever else is in the step.
pub trait Backend: Send {
    /// Name, threads, instruction set, memory: for `status` and logs.
    fn info(&self) -> BackendInfo;

    /// Names the tensor type or operation of a program that this backend cannot compute, before any weight is read. A
    /// plain function, because sessions call it on threads of their own.
    fn refuses(&self) -> fn(&Program) -> Option<BackendError>;

    /// True if the device computes from the mapped file. The engine then has the pages of weights read in before it runs
    /// their part, and may suspend a step inside a part.
    fn reads_in_place(&self) -> bool {
        false
    }

    /// Makes `tensor` usable. The CPU reads it in place at no cost. A GPU starts an upload and returns at once: parts
    /// wait for the tensors they use, and fail with [`BackendError::Upload`] if one fails to arrive.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`], [`BackendError::OutOfMemory`].
    fn load_tensor(&mut self, tensor: &LazyTensor) -> Result<DeviceTensor, BackendError>;

    /// Announces evictions: memory of handles that drop from now on is reused only after the work submitted so far.
    /// Costs nothing where weights are read in place.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`], [`BackendError::Device`].
    fn retire(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    /// Waits until a load in flight has completed or failed; an evicted load then frees its memory at once. Costs
    /// nothing where weights are read in place.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`] when nothing arrives within the device's load deadline.
    fn until_decided(&mut self, load: &Arc<dyn DeviceMemory>) -> Result<(), BackendError> {
        let _ = load; // the default has no loads
        Ok(())
    }

    /// The engine calls this repeatedly; `under_way` says whether loads are in flight that perhaps no step waits for.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`] when loads are in flight and nothing arrived within the device's load deadline.
    fn watch_loads(&mut self, under_way: bool) -> Result<(), BackendError> {
        let _ = under_way; // the default has no loads
        Ok(())
    }

    /// Bytes of device memory that a tensor takes, with padding and rounding; 0 where it is read in place. A plain
    /// function, because sessions call it on threads of their own.
    fn weight_bytes(&self) -> fn(&LazyTensor) -> u64 {
        |_| 0
    }

    /// As [`Backend::weight_bytes`], for the memory that [`Backend::open_model`] takes before the first KV page.
    fn scratch_bytes(&self) -> ScratchBytes {
        ScratchBytes::of(|_, _| 0)
    }

    /// Host memory that each row of a step takes; 0 where values are on a device. A plain function, as
    /// [`Backend::weight_bytes`].
    fn row_bytes(&self) -> fn(&Program) -> u64 {
        |_| 0
    }

    /// Device memory by owner; zeros where the device has no memory of its own.
    fn memory(&self) -> DeviceMemoryUse {
        DeviceMemoryUse::default()
    }

    /// Sets a counter that the backend increments while it waits for the device. Each such wait has its own deadline,
    /// so a thread in one does not count as hung.
    fn set_heartbeat(&mut self, heartbeat: Arc<AtomicU64>) {
        let _ = heartbeat; // the default never waits
    }

    /// Returns cached memory to the driver. Called when the device is idle, because the call may stall it.
    fn trim(&mut self) {}

    /// How many parts ahead of their use loads should start; 0 where a load costs nothing.
    fn parts_ahead(&self) -> usize {
        0
    }

    /// Counters since the device was opened.
    fn counters(&self) -> DeviceCounters {
        DeviceCounters::default()
    }

    /// Binds a program and reserves room for its steps: scratch for `limits`, and an empty pool of `kv_pages` KV
    /// pages of [`KV_PAGE_TOKENS`] tokens. A page takes memory when first written; [`Backend::release_pages`] frees
    /// it.
    ///
    /// # Errors
    /// The errors of [`Backend::refuses`]; [`BackendError::OutOfMemory`].
    fn open_model(
        &mut self,
        program: &Arc<Program>,
        limits: StepLimits,
        kv_pages: u32,
    ) -> Result<ModelSlot, BackendError>;

    /// Frees all memory that [`Backend::open_model`] and later steps took. Unknown slots are ignored.
    fn close_model(&mut self, slot: ModelSlot);

    /// Copies all keys and values of one KV page to another, which gets memory if it has none. Between steps of the
    /// model, or before the first part of one.
    ///
    /// # Errors
    /// [`BackendError::Absent`] if the model is not open, [`BackendError::Batch`] if `from` has no memory or `to` is
    /// outside the pool, [`BackendError::OutOfMemory`].
    fn copy_page(&mut self, slot: ModelSlot, from: u32, to: u32) -> Result<(), BackendError>;

    /// Copies a KV page to the host. Between steps, after all work in flight.
    ///
    /// # Errors
    /// [`BackendError::Absent`] if the model is not open, [`BackendError::Batch`] if the page has no memory,
    /// [`BackendError::DeviceLost`].
    fn read_page(&mut self, slot: ModelSlot, page: u32) -> Result<Vec<u8>, BackendError>;

    /// Fills a KV page, which gets memory if it has none, with what [`Backend::read_page`] returned.
    ///
    /// # Errors
    /// As [`Backend::copy_page`], and [`BackendError::Batch`] if `bytes` is not as long as a page.
    fn write_page(&mut self, slot: ModelSlot, page: u32, bytes: &[u8]) -> Result<(), BackendError>;

    /// As [`Backend::read_page`], for a recurrent state: [`Backend::recurrent_bytes`] of it.
    ///
    /// # Errors
    /// As [`Backend::read_page`].
    fn read_state(&mut self, slot: ModelSlot, state: u32) -> Result<Vec<u8>, BackendError>;

    /// As [`Backend::write_page`], for a recurrent state.
    ///
    /// # Errors
    /// As [`Backend::write_page`].
    fn write_state(&mut self, slot: ModelSlot, state: u32, bytes: &[u8]) -> Result<(), BackendError>;

    /// Names the layout of a KV page and of a recurrent state. Those of one program can be exchanged where this name is the same.
    fn page_layout(&self) -> &'static str;

    /// Frees the memory of these KV pages. Pages never written are ignored.
    fn release_pages(&mut self, slot: ModelSlot, pages: &[u32]);

    /// Frees the memory of these recurrent states. Numbers without memory are ignored.
    fn release_states(&mut self, slot: ModelSlot, states: &[u32]);

    /// Bytes of device memory that a sequence's recurrent states take at one place, with padding and rounding; 0 for most
    /// programs. The budget of KV pages counts them too, and [`Backend::kv_bytes`] grows by them. A plain function, because
    /// sessions call it on threads of their own.
    fn recurrent_bytes(&self) -> fn(&Program) -> u64 {
        Program::recurrent_bytes
    }

    /// Bytes of device memory that one KV page of a program takes, with padding and rounding. The budget counts this,
    /// and [`Backend::kv_bytes`] grows by it. `u64::MAX` if such a page is impossible. A plain function, because
    /// sessions call it on threads of their own.
    fn kv_page_bytes(&self) -> fn(&Program) -> u64;

    /// Most bytes that KV pages of all models may take beside weights; `None` if only the configured budget limits
    /// them.
    fn kv_bytes_max(&self) -> Option<u64> {
        None
    }

    /// Bytes that the KV pages and recurrent states of `slot` take now.
    fn kv_bytes(&self, slot: ModelSlot) -> u64;

    /// Bytes that `slot` took before its first KV page: [`Backend::scratch_bytes`] of its program, known without binding
    /// it again. 0 for a model that is not open.
    fn open_bytes(&self, slot: ModelSlot) -> u64 {
        let _ = slot; // the default has no memory of its own
        0
    }

    /// Starts a step on `slot`. Checks the batch: lengths agree, and page numbers are in the pool.
    ///
    /// # Errors
    /// [`BackendError::Batch`], [`BackendError::OutOfMemory`] (KV pages and recurrent states get memory here).
    fn begin_step(&mut self, slot: ModelSlot, batch: &StepBatch<'_>) -> Result<(), BackendError>;

    /// Runs the part that follows the last one run. `weights` has all of the part's tensors that are [for the
    /// device](crate::program::Residence::Device), and those chosen experts' tensors that an earlier step needed.
    ///
    /// Where rows chose experts that are not resident, the part stops and [names their tensors](Progress::Needs). The
    /// caller loads them and calls again: the part resumes where it stopped. A part that computes for long
    /// [pauses](Progress::Paused) and resumes likewise. A stop for experts waits for the device; a part
    /// with all its experts does not. After [`Progress::Again`] the caller goes on with the first part, at most once a
    /// step.
    ///
    /// # Errors
    /// [`BackendError`] of an operation; it ends the step.
    fn run(&mut self, part: u32, weights: &Weights<'_>) -> Result<Progress, BackendError>;

    /// Suspends the step, between two parts or inside one that paused: steps of other models may begin before
    /// [`Backend::resume_step`]. Its model begins no other step until then, unless the suspended one is given up, or with
    /// [`Backend::begin_beside`].
    ///
    /// # Errors
    /// As [`Backend::run`].
    fn suspend_step(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    /// As [`Backend::begin_step`], while a suspended step of the model waits: that one can be resumed once this one is done or given
    /// up. The two write no page that the other one reads or writes. Only for a backend that [reads weights in
    /// place](Backend::reads_in_place).
    ///
    /// # Errors
    /// As [`Backend::begin_step`].
    fn begin_beside(&mut self, _slot: ModelSlot, _batch: &StepBatch<'_>) -> Result<(), BackendError> {
        Err(BackendError::OutOfOrder("this backend has one step of a model at a time"))
    }

    /// As [`Backend::resume_step`] for a step that began with [`Backend::begin_beside`] and was suspended too.
    ///
    /// # Errors
    /// As [`Backend::resume_step`].
    fn resume_beside(&mut self, _slot: ModelSlot) -> Result<(), BackendError> {
        Err(BackendError::OutOfOrder("this backend has one step of a model at a time"))
    }

    /// Gives host memory of the model's last step back: its values are gone. For a model without a suspended step.
    fn release_values(&mut self, _slot: ModelSlot) {}

    /// Makes the suspended step of `slot` the current one.
    ///
    /// # Errors
    /// [`BackendError::OutOfOrder`] if no step of `slot` has begun.
    fn resume_step(&mut self, slot: ModelSlot) -> Result<(), BackendError>;

    /// Draws one token for each of `batch.logits_rows`; `rows` and the result are parallel to it. A row whose logits
    /// are not finite fails alone with [`BackendError::NotFinite`].
    ///
    /// # Errors
    /// As [`Backend::run`], for a failure of all rows.
    fn sample(&mut self, rows: &[SampleRow]) -> Result<Vec<Result<Sampled, BackendError>>, BackendError>;

    /// Waits for the end of a step that is not sampled. Its time then counts as its own, and not as the next step's.
    ///
    /// # Errors
    /// As [`Backend::run`].
    fn finish_step(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    /// How long this step waited for weights in flight, computing nothing. Called once, after the step's last part.
    /// If the step waited at all, this call waits for its end.
    #[allow(missing_docs)]
    fn load_wait(&mut self) -> Result<Duration, BackendError> {
        Ok(Duration::ZERO)
    }

    /// Copies the last layer's rows of the current step to the host, one after the other: those that
    /// [`Program::last_rows`] names. After the part of the last layer, and of the head if the step has logits.
    ///
    /// # Errors
    /// [`BackendError::Absent`] for rows that the step does not have; [`BackendError::DeviceLost`].
    fn last_rows(&mut self, rows: Range<u32>) -> Result<Vec<f32>, BackendError> {
        let _ = rows; // the default keeps none
        Err(BackendError::Absent("this device keeps no rows of the last layer"))
    }

    /// Copies the logits of `batch.logits_rows[index]` to the host: `vocab` values.
    #[allow(missing_docs)]
    fn logits(&mut self, index: usize) -> Result<Vec<f32>, BackendError>;
}
