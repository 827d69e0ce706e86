//! What computes: one trait of fused units that a GPU takes as single launches.
//!
//! A step takes `rows` token rows of several sequences of one model down the layers:
//! `begin_step`, `embed`, per layer (`attention_input`, `attention`, `attention_output`, then `ffn_input`, `ffn_output`,
//! or in a layer of experts `route`, `experts`), `head`, then `sample` or `logits`. Activations, KV pages and scratch
//! belong to the backend; the caller names rows, positions and pages by number only, so that all of it can lie on a
//! device.

mod checks;
mod closed;
pub mod cpu;
pub mod doctor;
pub mod hip;
mod rope;
mod types;

pub use closed::Closed;
pub use rope::*;
pub use types::*;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::tensor::LazyTensor;

/// A device that runs steps. Owned by one engine thread; no method is called from another.
///
/// Rows of one step never influence each other's bits, whatever else is in the step.
pub trait Backend: Send {
    /// Name, threads, instruction set, memory: for `status` and logs.
    fn info(&self) -> BackendInfo;

    /// Whether weights of this type can be computed with.
    fn supports(&self, dtype: crate::tensor::DType) -> bool;

    /// Makes `tensor` usable. The CPU takes it in place at no cost; a GPU starts to upload it and returns at once: units
    /// wait for what they use, and fail with [`BackendError::Upload`] when it never came.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`], [`BackendError::OutOfMemory`].
    fn load_tensor(&mut self, tensor: &LazyTensor) -> Result<DeviceTensor, BackendError>;

    /// As [`Backend::load_tensor`] for the table of [`Backend::embed`], of which a step takes single rows: a device may
    /// leave it where it is.
    ///
    /// # Errors
    /// As [`Backend::load_tensor`].
    fn load_table(&mut self, tensor: &LazyTensor) -> Result<DeviceTensor, BackendError> {
        self.load_tensor(tensor)
    }

    /// Weights are about to leave: memory of handles that drop from now on is written again only behind the work that was
    /// begun so far, all but the last operation of the step under way. Costs nothing where nothing is copied.
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
    fn scratch_bytes(&self) -> fn(&ModelDims) -> u64 {
        |_| 0
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

    /// How many layers before their turn loads are worth starting; 0 where a load costs nothing.
    fn layers_ahead(&self) -> usize {
        0
    }

    /// What the device did since it was opened.
    fn counters(&self) -> DeviceCounters {
        DeviceCounters::default()
    }

    /// Room for one model: scratch for `dims.rows_max` rows and an empty KV pool of `kv_pages` pages of
    /// [`KV_PAGE_TOKENS`] tokens. Pages take memory when first written and give it back by [`Backend::release_pages`].
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`].
    fn open_model(&mut self, dims: &ModelDims, kv_pages: u32) -> Result<ModelSlot, BackendError>;

    /// Gives back all that [`Backend::open_model`] and later steps took. Unknown slots are ignored.
    fn close_model(&mut self, slot: ModelSlot);

    /// Gives the memory of these KV pages back. Pages never written are ignored.
    fn release_pages(&mut self, slot: ModelSlot, pages: &[u32]);

    /// What one KV page of a model of these sizes takes of the device's memory, with all padding and rounding: what the
    /// budget counts, and what [`Backend::kv_bytes`] grows by. `u64::MAX` when there can be no such page. A plain
    /// function, because sessions ask on threads of their own.
    fn kv_page_bytes(&self) -> fn(&ModelDims) -> u64;

    /// Most bytes that KV pages of all models may ever take beside weights; `None` where the configured budget alone says.
    fn kv_bytes_max(&self) -> Option<u64> {
        None
    }

    /// Bytes that the pages of `slot` take now.
    fn kv_bytes(&self, slot: ModelSlot) -> u64;

    /// Starts a step on `slot`. The batch is checked: lengths agree, page numbers are in the pool.
    ///
    /// # Errors
    /// [`BackendError::Batch`], [`BackendError::OutOfMemory`] (KV pages are materialised here).
    fn begin_step(&mut self, slot: ModelSlot, batch: &StepBatch<'_>) -> Result<(), BackendError>;

    /// Residual row r = row `token_ids[r]` of `table`, as f32.
    ///
    /// # Errors
    /// [`BackendError`], as all units below.
    fn embed(&mut self, table: &DeviceTensor) -> Result<(), BackendError>;

    /// Norm, q/k/v projections with optional biases, rotary embedding; q to scratch, k and v to their KV pages.
    #[allow(missing_docs)]
    fn attention_input(&mut self, layer: u32, weights: &AttentionInput<'_>) -> Result<(), BackendError>;

    /// Causal attention of each row over its sequence's pages, positions `0..=position`.
    #[allow(missing_docs)]
    fn attention(&mut self, layer: u32) -> Result<(), BackendError>;

    /// Residual += output projection of the attention result (+ bias).
    #[allow(missing_docs)]
    fn attention_output(&mut self, weights: &Projection<'_>) -> Result<(), BackendError>;

    /// Norm, gate and up projections, `silu(gate) * up` to scratch.
    #[allow(missing_docs)]
    fn ffn_input(&mut self, weights: &FfnInput<'_>) -> Result<(), BackendError>;

    /// Residual += down projection of the scratch (+ bias).
    #[allow(missing_docs)]
    fn ffn_output(&mut self, weights: &Projection<'_>) -> Result<(), BackendError>;

    /// Norm, router, and the choice of each row's `used` best experts (the lower number of equals) with their weights:
    /// `softmax(logits)`, as [`ExpertDims`] says normalised and scaled. Normed rows, choice and weights stay on the device.
    #[allow(missing_docs)]
    fn route(&mut self, layer: u32, weights: &Router<'_>) -> Result<(), BackendError>;

    /// Numbers of the experts that the last [`Backend::route`] chose for any row, rising. Waits for the device, so it is
    /// asked only while some of the layer's experts are not loaded.
    #[allow(missing_docs)]
    fn routed(&mut self) -> Result<Vec<u32>, BackendError>;

    /// Residual += the weighted sum over each row's chosen experts of `down(silu(gate x) * up x)`, x the row normed by
    /// [`Backend::route`]. All that were chosen are loaded.
    #[allow(missing_docs)]
    fn experts(&mut self, layer: u32, experts: &Experts<'_>) -> Result<(), BackendError>;

    /// Final norm and output projection of `batch.logits_rows`; logits stay on the device.
    #[allow(missing_docs)]
    fn head(&mut self, norm: &DeviceTensor, output: &DeviceTensor) -> Result<(), BackendError>;

    /// Draws one token for each of `batch.logits_rows`; `rows` is parallel to it, and so is the result. A row from whose
    /// logits nothing can be drawn ([`BackendError::NotFinite`]) fails alone.
    ///
    /// # Errors
    /// As all units, for what fails all rows.
    fn sample(&mut self, rows: &[SampleRow]) -> Result<Vec<Result<Sampled, BackendError>>, BackendError>;

    /// How long the step at hand waited for weights on their way to the device: time in which it computed nothing. Asked
    /// once, after the step's last unit; where the step waited at all, this waits for its end.
    #[allow(missing_docs)]
    fn load_wait(&mut self) -> Result<Duration, BackendError> {
        Ok(Duration::ZERO)
    }

    /// Copies the logits of `batch.logits_rows[index]` to the host: `vocab` values.
    #[allow(missing_docs)]
    fn logits(&mut self, index: usize) -> Result<Vec<f32>, BackendError>;
}
