//! What crosses the [`Backend`](super::Backend) trait.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use crate::program::TensorId;
use crate::tensor::{DType, LazyTensor};

/// Tokens in a KV page: one page of one head is 8 KiB at head_dim 128 in f16, enough to keep a gather near the read rate.
pub const KV_PAGE_TOKENS: usize = 32;

/// Room of one model on a backend, from `open_model`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ModelSlot(pub u32);

/// Element type of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvType {
    /// Half precision: the default.
    #[default]
    F16,
    /// Single precision: a checking mode.
    F32,
}

/// What quantised weights are multiplied with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    /// 8-bit codes, one f32 scale per 32 values; on the CPU 16 bits for groups that stand out: the default.
    #[default]
    Int8,
    /// Single precision: a checking mode.
    F32,
}

/// Most rows of a model's steps: what scratch is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Rows.
    pub rows: usize,
    /// Rows whose logits are wanted; at most `rows`.
    pub wanted_rows: usize,
}

/// A tensor that a backend can compute with.
#[derive(Clone, Debug)]
pub struct DeviceTensor {
    /// What it is: name, type, shape.
    pub tensor: LazyTensor,
    /// Where its values are.
    pub storage: Storage,
}

/// Where a [`DeviceTensor`]'s values are.
#[derive(Clone, Debug)]
pub enum Storage {
    /// In the file mapping, read in place.
    InPlace,
    /// In memory of the device's own, or on the way there.
    Device(Arc<dyn DeviceMemory>),
}

/// One tensor's copy in a device's memory. Its memory is given back when the last handle drops.
pub trait DeviceMemory: Any + Debug + Send + Sync {
    /// Bytes of device memory it takes.
    fn bytes(&self) -> u64;

    /// Where on the device: equal for equal copies.
    fn address(&self) -> u64;

    /// Whether the values have arrived.
    fn state(&self) -> LoadState;

    /// Calls `done` once the values have arrived or never will; at once where that is decided. Must not block.
    fn when_decided(&self, done: Box<dyn FnOnce() + Send>);
}

/// How far a load is. It ends once, in one of the two last states.
#[derive(Clone, Debug)]
pub enum LoadState {
    /// On the way.
    Loading,
    /// There.
    Resident,
    /// It never will be: the copy is worth nothing, the next request makes a new one.
    Failed(BackendError),
}

impl DeviceTensor {
    /// Element type.
    pub fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    /// Rows (outputs of a projection).
    pub fn rows(&self) -> usize {
        self.tensor.shape().rows() as usize
    }

    /// Values per row (inputs of a projection).
    pub fn cols(&self) -> usize {
        self.tensor.shape().cols() as usize
    }

    /// Bytes on the device beyond the mapping.
    pub fn device_bytes(&self) -> u64 {
        match &self.storage {
            Storage::InPlace => 0,
            Storage::Device(memory) => memory.bytes(),
        }
    }

    /// How far its load is.
    pub fn state(&self) -> LoadState {
        match &self.storage {
            Storage::InPlace => LoadState::Resident,
            Storage::Device(memory) => memory.state(),
        }
    }
}

/// A program's tensors as far as a device has them.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    /// By number of the tensor: those of the part at hand, and of others as it happens.
    pub tensors: &'a [Option<DeviceTensor>],
    /// By number of the part: another number whenever a tensor of it comes or leaves, and never one that was used before. What a
    /// device has made of addresses is good as long as this is the same.
    pub generations: &'a [u64],
}

impl<'a> Weights<'a> {
    /// A tensor of the part at hand.
    ///
    /// # Errors
    /// [`BackendError::Internal`] for one that is not there: a bug of the caller.
    pub fn tensor(&self, id: TensorId) -> Result<&'a DeviceTensor, BackendError> {
        let there = self.tensors.get(id.0 as usize).and_then(Option::as_ref);
        there.ok_or_else(|| BackendError::Internal(format!("tensor {} was not loaded for its part", id.0)))
    }

    /// Whether a tensor is there.
    pub fn has(&self, id: TensorId) -> bool {
        self.tensors.get(id.0 as usize).is_some_and(Option::is_some)
    }
}

/// How far a part came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All of it is computed, or on its way.
    Done,
    /// Up to experts that rows chose and that are not there: their tensors, none of them twice.
    Needs(Vec<TensorId>),
}

/// One step's variable data: plain arrays of numbers, ready to be copied to a device.
#[derive(Clone, Copy, Debug)]
pub struct StepBatch<'a> {
    /// Token of each row. Each is below the vocabulary's size.
    pub token_ids: &'a [u32],
    /// Position of each row in its sequence. Rows of one sequence stand in rising order.
    pub positions: &'a [u32],
    /// Which sequence of this step a row belongs to: an index into the page tables.
    pub row_sequences: &'a [u32],
    /// Page tables of the step's sequences, one after the other: `sequences * page_table_stride` page numbers.
    /// Entry p of a sequence holds its positions `p * KV_PAGE_TOKENS ..`; entries past its length are not read.
    pub page_tables: &'a [u32],
    /// Entries per sequence in `page_tables`.
    pub page_table_stride: usize,
    /// Rows whose logits are wanted, rising.
    pub logits_rows: &'a [u32],
}

/// How to draw the next token of a row. Pure numbers, so that a device can do it.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleRow {
    /// 0 takes the most likely token (lowest id of equals); above, logits are divided by it.
    pub temperature: f32,
    /// Keep the k most likely; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of the most likely tokens with at least this probability; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens below this share of the most likely one's probability; 0 drops none.
    pub min_p: f32,
    /// Seed of the sequence.
    pub seed: u64,
    /// Position of the token to be drawn: with `seed` it decides the random number, whatever else is in the step.
    pub position: u32,
    /// How many of the most likely tokens to report with log-probabilities (of the untouched distribution), 0 for none.
    pub top_logprobs: u32,
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub id: u32,
    /// Its log-probability in the untouched distribution; only with `top_logprobs > 0`, else 0.
    pub logprob: f32,
    /// The most likely tokens and their log-probabilities, falling.
    pub top: Vec<(u32, f32)>,
}

/// What a backend is.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendInfo {
    /// `cpu`, later `hip`.
    pub kind: &'static str,
    /// Device name, as the processor's model name.
    pub device: String,
    /// Instruction set in use, as `avx512vnni`, `avx2`, `portable`.
    pub isa: String,
    /// Threads that compute.
    pub threads: usize,
    /// Rows of a step from which on one costs nearly as much as two of half as many.
    pub step_rows: usize,
    /// What quantised weights meet.
    pub activations: Activations,
    /// KV cache element type.
    pub kv: KvType,
    /// What else a person wants to know of it, as names and values: driver, memory, how weights get there, why it is no
    /// other device.
    pub notes: Vec<(&'static str, String)>,
}

/// One way of bringing weights to a device, and what was seen of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UploadRate {
    /// What it is called; empty where there is no such way.
    pub path: &'static str,
    /// Threads that carry it.
    pub threads: u16,
    /// Bytes that it is judged by: not the first, nor those of short tensors.
    pub bytes: u64,
    /// Time in which they were on their way.
    pub busy: Duration,
    /// Taken for what comes next.
    pub in_use: bool,
    /// The driver did not let it be taken.
    pub refused: bool,
}

impl UploadRate {
    /// Bytes a second; 0 where nothing went this way.
    pub fn bytes_per_second(&self) -> f64 {
        let seconds = self.busy.as_secs_f64();
        if seconds > 0.0 { self.bytes as f64 / seconds } else { 0.0 }
    }
}

impl std::fmt::Display for UploadRate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { path, threads, bytes, refused, .. } = self;
        write!(f, "{path}, {threads} thread{}", if *threads == 1 { "" } else { "s" })?;
        match (refused, bytes) {
            (true, _) => f.write_str(": refused by the driver"),
            (false, 0) => Ok(()),
            (false, _) => {
                write!(f, ": {:.1} GB/s over {} MiB", self.bytes_per_second() / 1e9, bytes >> 20)
            }
        }
    }
}

/// A device's memory: what this process has taken of it, for what, and what else is known. All in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemoryUse {
    /// Copies of weights.
    pub weights: u64,
    /// KV pages.
    pub kv: u64,
    /// Activations and step arrays.
    pub scratch: u64,
    /// Where uploads lie before they are laid out.
    pub staging: u64,
    /// Recorded graphs, by what the driver had less free when they were made.
    pub graphs: u64,
    /// Taken from the driver: the sum of these and what is kept for the next who asks.
    pub taken: u64,
    /// Most that may be taken: the configured budget, or the whole device.
    pub budget: u64,
    /// Of the whole device, as the driver says; 0 where it does not.
    pub total: u64,
    /// Free on the whole device, as the driver says.
    pub free: u64,
    /// In use by all programs together, as the kernel counts; none where it does not.
    pub kernel_used: Option<u64>,
}

impl DeviceMemoryUse {
    /// What counts of one device's memory may differ by. The driver keeps page tables, firmware and screens beside what programs
    /// have, some 100 MB; and between two looks a chunk or two changes hands.
    pub const COUNTS_DIFFER_MAX: u64 = 1 << 30;

    /// Where counts contradict each other by more than [`Self::COUNTS_DIFFER_MAX`], in words with the numbers: ours may not be
    /// more than the kernel's, which has all programs; the runtime's is to be the kernel's.
    pub fn contradiction(&self) -> Option<String> {
        let (kernel, bound) = (self.kernel_used?, Self::COUNTS_DIFFER_MAX);
        let runtime = self.total.saturating_sub(self.free);
        let mib = |bytes: u64| bytes >> 20;
        if self.taken > kernel.saturating_add(bound) {
            let (taken, kernel) = (mib(self.taken), mib(kernel));
            return Some(format!(
                "the ledger has {taken} MiB, the kernel counts {kernel} MiB in use by all programs: the ledger is wrong"
            ));
        }
        (runtime.abs_diff(kernel) > bound).then(|| {
            let (runtime, kernel, bound) = (mib(runtime), mib(kernel), mib(bound));
            format!(
                "the runtime says {runtime} MiB are in use, the kernel {kernel} MiB: what is free is not known to {bound} MiB"
            )
        })
    }

    /// Bytes in use by this process's own owners.
    pub fn used(&self) -> u64 {
        self.weights + self.kv + self.scratch + self.staging + self.graphs
    }

    /// What could still be taken: free at the driver and within the budget, and what is kept.
    pub fn available(&self) -> u64 {
        let kept = self.taken.saturating_sub(self.used());
        self.free.min(self.budget.saturating_sub(self.taken)) + kept
    }

    /// What others than this process's buffers have: other programs, and the driver's own needs.
    pub fn others(&self) -> u64 {
        self.total.saturating_sub(self.free).saturating_sub(self.taken)
    }
}

/// What a device did since it was opened. Zeros where weights are read in place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounters {
    /// Tensors whose bytes were brought to the device.
    pub uploads: u64,
    /// Bytes read from files for them.
    pub upload_bytes: u64,
    /// Loads that failed.
    pub upload_failures: u64,
    /// Ways that they may take.
    pub upload_rates: [UploadRate; 4],
    /// Steps whose layers were one replay of a recorded graph.
    pub graph_replays: u64,
    /// Graphs recorded.
    pub graphs: u64,
    /// Why none is replayed any more.
    pub graphs_refused: Option<&'static str>,
    /// Bytes of device memory in use: weights, KV pages, scratch.
    pub used_bytes: u64,
}

/// Why a backend did not do what was asked.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BackendError {
    /// A tensor type this backend has no arithmetic for.
    #[error("tensor {tensor}: type {dtype} is not supported by the {backend} backend")]
    Unsupported {
        /// Tensor name.
        tensor: String,
        /// Its type.
        dtype: DType,
        /// Backend kind.
        backend: &'static str,
    },
    /// An operation, or attributes of one, that this backend has no arithmetic for.
    #[error("the {backend} backend cannot run {operation}")]
    Operation {
        /// Which, as `attention of heads of 512 values`.
        operation: String,
        /// Backend kind.
        backend: &'static str,
    },
    /// The backend could not be started.
    #[error("{what}: {why}")]
    Start {
        /// What was missing.
        what: &'static str,
        /// Why.
        why: String,
    },
    /// A model's sizes contradict each other.
    #[error("model dimensions refused: {0}")]
    Dims(&'static str),
    /// A check of ours was not enough: a bug, reported and not computed.
    #[error("internal error of the backend: {0}")]
    Internal(String),
    /// Memory is short.
    #[error("{what} needs {need_bytes} bytes, which could not be had")]
    OutOfMemory {
        /// What for.
        what: &'static str,
        /// How much.
        need_bytes: u64,
    },
    /// A step's arrays contradict each other or the model: a broken invariant of the caller, reported and not computed.
    #[error("step batch refused: {0}")]
    Batch(&'static str),
    /// Weights have another shape than the model's dimensions say.
    #[error("tensor {tensor}: shape {shape} where {want} was expected")]
    Shape {
        /// Tensor name.
        tensor: String,
        /// Its shape.
        shape: String,
        /// The expected shape.
        want: String,
    },
    /// A device is gone, hangs, or nothing on it can be trusted any more.
    #[error("{device} was lost in {call}: {why}")]
    DeviceLost {
        /// Which.
        device: String,
        /// The call.
        call: &'static str,
        /// What it said, with its code.
        why: String,
    },
    /// A tensor's bytes did not reach the device.
    #[error("tensor {tensor} could not be brought to the device: {why}")]
    Upload {
        /// Its name.
        tensor: String,
        /// Why.
        why: String,
    },
    /// Nobody wanted the step any more.
    #[error("the step was given up")]
    GivenUp,
    /// A device did not do what was asked, and goes on.
    #[error(transparent)]
    Device(super::hip::HipError),
    /// Values that are no numbers came out: the weights are broken.
    #[error("logits are not finite: the model's weights hold infinities or NaN")]
    NotFinite,
}

impl BackendError {
    /// What memory was short for and how many bytes, where it was.
    pub fn needs(&self) -> Option<(String, u64)> {
        match self {
            Self::OutOfMemory { what, need_bytes } => Some(((*what).to_owned(), *need_bytes)),
            Self::Device(super::hip::HipError::OutOfMemory { owner, need_bytes, .. }) => {
                Some((owner.to_string(), *need_bytes))
            }
            _ => None,
        }
    }

    /// Whether memory was short: less of it in use, and the same call may succeed.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } => true,
            Self::Device(error) => error.is_out_of_memory(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_that_contradict_each_other_are_told_beyond_the_bound() {
        const GIB: u64 = 1 << 30;
        let counted = |kernel_used| {
            let memory =
                DeviceMemoryUse { taken: 8 * GIB, total: 16 * GIB, free: 7 * GIB, ..Default::default() };
            DeviceMemoryUse { kernel_used, ..memory }.contradiction()
        };
        for good in [9 * GIB, 10 * GIB, 8 * GIB] {
            assert_eq!(counted(Some(good)), None, "{good}");
        }
        assert_eq!(counted(None), None, "nobody counts");
        let text = counted(Some(7 * GIB - 1)).unwrap();
        assert!(text.contains("the ledger has 8192 MiB, the kernel counts 7167 MiB"), "{text}");
        let text = counted(Some(10 * GIB + 1)).unwrap();
        assert!(text.contains("9216 MiB are in use, the kernel 10240 MiB"), "{text}");
    }
}
