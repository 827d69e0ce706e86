//! What computes: a trait that binds programs and runs their parts.
//!
//! [`Backend::open_model`] binds a program: the backend chooses a kernel for each stretch of operations and places values in
//! memory. A step takes `rows` token rows of several sequences of one model through the parts: `begin_step`, `run` for each part,
//! then `sample` or `logits`. Values, KV pages and scratch belong to the backend; the caller names rows, positions and pages by
//! number only, so that all of it can lie on a device.

mod checks;
mod closed;
pub mod cpu;
pub mod doctor;
pub mod hip;
mod types;

pub use closed::Closed;
pub use types::*;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::program::Program;
use crate::tensor::LazyTensor;

/// A device that runs steps. Owned by one engine thread; no method is called from another.
///
/// Rows of one step never influence each other's bits, whatever else is in the step.
pub trait Backend: Send {
    /// Name, threads, instruction set, memory: for `status` and logs.
    fn info(&self) -> BackendInfo;

    /// Refuses a program with a tensor type or an operation that this backend has no arithmetic for, by name, before a byte
    /// of it is read. A plain function, because sessions ask on threads of their own.
    fn refuses(&self) -> fn(&Program) -> Option<BackendError>;

    /// Makes `tensor` usable. The CPU takes it in place at no cost; a GPU starts to upload it and returns at once: parts
    /// wait for what they use, and fail with [`BackendError::Upload`] when it never came.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`], [`BackendError::OutOfMemory`].
    fn load_tensor(&mut self, tensor: &LazyTensor) -> Result<DeviceTensor, BackendError>;

    /// Weights are about to leave: memory of handles that drop from now on is written again only behind the work that was
    /// begun so far. Costs nothing where nothing is copied.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`], [`BackendError::Device`].
    fn retire(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    /// Waits until a load that is under way is decided; what came and leaves then gives its memory back at once. Costs nothing
    /// where nothing is copied.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`] when nothing arrives for as long as the device has patience.
    fn until_decided(&mut self, load: &Arc<dyn DeviceMemory>) -> Result<(), BackendError> {
        let _ = load; // the default has none
        Ok(())
    }

    /// Asked again and again, with whether loads are under way that perhaps no step waits for.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`] when they are, and nothing has arrived for as long as the device has patience.
    fn watch_loads(&mut self, under_way: bool) -> Result<(), BackendError> {
        let _ = under_way; // the default has none
        Ok(())
    }

    /// Bytes that a tensor takes of the device's memory, with padding and rounding: 0 where it is read in place. A plain
    /// function, because sessions ask on threads of their own.
    fn weight_bytes(&self) -> fn(&LazyTensor) -> u64 {
        |_| 0
    }

    /// As [`Backend::weight_bytes`] for what [`Backend::open_model`] takes before the first KV page.
    fn scratch_bytes(&self) -> fn(&Program, StepLimits) -> u64 {
        |_, _| 0
    }

    /// Who has how much of the device's memory; zeros where there is none but the machine's.
    fn memory(&self) -> DeviceMemoryUse {
        DeviceMemoryUse::default()
    }

    /// A count to move while the device is waited for: each such wait has an end of its own, and who waits so does not hang.
    fn set_heartbeat(&mut self, heartbeat: Arc<AtomicU64>) {
        let _ = heartbeat; // the default never waits
    }

    /// Gives back to the driver what is kept for who asks next. Called when the device is idle: it may stop for that.
    fn trim(&mut self) {}

    /// How many parts before their turn loads are worth starting; 0 where a load costs nothing.
    fn parts_ahead(&self) -> usize {
        0
    }

    /// What the device did since it was opened.
    fn counters(&self) -> DeviceCounters {
        DeviceCounters::default()
    }

    /// Binds a program, and makes room for its steps: scratch for `limits`, and an empty pool of `kv_pages` KV pages of
    /// [`KV_PAGE_TOKENS`] tokens. Pages take memory when first written and give it back by [`Backend::release_pages`].
    ///
    /// # Errors
    /// What [`Backend::refuses`] says; [`BackendError::OutOfMemory`].
    fn open_model(
        &mut self,
        program: &Arc<Program>,
        limits: StepLimits,
        kv_pages: u32,
    ) -> Result<ModelSlot, BackendError>;

    /// Gives back all that [`Backend::open_model`] and later steps took. Unknown slots are ignored.
    fn close_model(&mut self, slot: ModelSlot);

    /// Gives the memory of these KV pages back. Pages never written are ignored.
    fn release_pages(&mut self, slot: ModelSlot, pages: &[u32]);

    /// What one KV page of a program takes of the device's memory, with all padding and rounding: what the
    /// budget counts, and what [`Backend::kv_bytes`] grows by. `u64::MAX` when there can be no such page. A plain
    /// function, because sessions ask on threads of their own.
    fn kv_page_bytes(&self) -> fn(&Program) -> u64;

    /// Most bytes that KV pages of all models may ever take beside weights; `None` where the configured budget alone says.
    fn kv_bytes_max(&self) -> Option<u64> {
        None
    }

    /// Bytes that the pages of `slot` take now.
    fn kv_bytes(&self, slot: ModelSlot) -> u64;

    /// Starts a step on `slot`. The batch is checked: lengths agree, page numbers are in the pool.
    ///
    /// # Errors
    /// [`BackendError::Batch`], [`BackendError::OutOfMemory`] (KV pages get memory here).
    fn begin_step(&mut self, slot: ModelSlot, batch: &StepBatch<'_>) -> Result<(), BackendError>;

    /// Runs a part of the step's program, which follows the part run last. `weights` has all of the part's tensors that are
    /// [for the device](crate::program::Residence::Device), and of the chosen ones those that some step needed before.
    ///
    /// Where rows chose experts that are not there, the part stops and [names their tensors](Progress::Needs). The caller loads
    /// them and calls again: the part goes on where it stopped. That waits for the device; a part that lacks no expert does not.
    ///
    /// # Errors
    /// [`BackendError`] of an operation; the step is over then.
    fn run(&mut self, part: u32, weights: &Weights<'_>) -> Result<Progress, BackendError>;

    /// Draws one token for each of `batch.logits_rows`; `rows` is parallel to it, and so is the result. A row from whose
    /// logits nothing can be drawn ([`BackendError::NotFinite`]) fails alone.
    ///
    /// # Errors
    /// As [`Backend::run`], for what fails all rows.
    fn sample(&mut self, rows: &[SampleRow]) -> Result<Vec<Result<Sampled, BackendError>>, BackendError>;

    /// How long the step at hand waited for weights on their way to the device: time in which it computed nothing. Asked
    /// once, after the step's last part; where the step waited at all, this waits for its end.
    #[allow(missing_docs)]
    fn load_wait(&mut self) -> Result<Duration, BackendError> {
        Ok(Duration::ZERO)
    }

    /// Copies the logits of `batch.logits_rows[index]` to the host: `vocab` values.
    #[allow(missing_docs)]
    fn logits(&mut self, index: usize) -> Result<Vec<f32>, BackendError>;
}
