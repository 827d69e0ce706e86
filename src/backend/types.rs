//! Types that cross the [`Backend`](super::Backend) trait.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use super::{BackendError, Chain};
use crate::program::{Op, Program, State, TensorId};
use crate::tensor::{DType, LazyTensor};

/// Tokens in a KV page. One page of one head is 8 KiB at head_dim 128 in f16, enough to keep a gather near the read
/// rate.
pub const KV_PAGE_TOKENS: usize = 32;

/// A model opened on a backend; returned by `open_model`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ModelSlot(pub u32);

/// Element type of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvType {
    /// Half precision, the default.
    #[default]
    F16,
    /// On the CPU, 8-bit codes, with an f16 scale for each [`KV_GROUP`] values of a key or value: 17 bytes where f16 has 32.
    Int8,
    /// Single precision, for checking.
    F32,
}

/// Values of a key or value that share a scale in [`KvType::Int8`].
pub const KV_GROUP: usize = 32;

impl KvType {
    /// The type that a program's pages have where this one is configured. Codes need heads of whole groups, of 256 values at
    /// most. Texts that are seen both ways are computed once and not kept. All others have f16 instead.
    #[must_use]
    pub fn within(self, program: &Program) -> Self {
        let whole = |state: &State| match state {
            State::Kv { head_dim, .. } => *head_dim <= 256 && (*head_dim as usize).is_multiple_of(KV_GROUP),
            State::Recurrent { .. } => true,
        };
        let both_ways = |op: &Op| matches!(op, Op::Attend { both_ways: true, .. });
        let fits = program.states().iter().all(whole)
            && !program.parts().iter().flat_map(|part| &part.ops).any(both_ways);
        if self == Self::Int8 && !fits { Self::F16 } else { self }
    }
}

/// Form of the activations that quantised weights are multiplied with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivationType {
    /// The default: 8-bit codes, one f32 scale per 32 values. On the CPU, groups with outliers have 16 bits.
    #[default]
    Int8,
    /// Single precision, for checking.
    F32,
}

/// Most rows of a model's steps; scratch is sized for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Rows.
    pub rows: usize,
    /// Rows that ask for logits; at most `rows`.
    pub wanted_rows: usize,
}

/// Computes the bytes of [`super::Backend::scratch_bytes`]. Sessions call it on threads of their own.
#[derive(Clone)]
pub struct ScratchBytes(Arc<BytesOf>);

type BytesOf = dyn Fn(&Program, StepLimits) -> u64 + Send + Sync;

impl ScratchBytes {
    /// The bytes that `of` computes.
    pub fn of(of: impl Fn(&Program, StepLimits) -> u64 + Send + Sync + 'static) -> Self {
        Self(Arc::new(of))
    }

    /// Device bytes of a program's activations in steps of at most that many rows.
    pub fn bytes(&self, program: &Program, limits: StepLimits) -> u64 {
        (self.0)(program, limits)
    }
}

impl Debug for ScratchBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ScratchBytes")
    }
}

/// A tensor that a backend can compute with.
#[derive(Clone, Debug)]
pub struct DeviceTensor {
    /// Name, type and shape.
    pub tensor: LazyTensor,
    /// Where its values are stored.
    pub storage: Storage,
}

/// Where a [`DeviceTensor`]'s values are stored.
#[derive(Clone, Debug)]
pub enum Storage {
    /// In the file mapping, read in place.
    InPlace,
    /// In the device's own memory, or in flight to it.
    Device(Arc<dyn DeviceMemory>),
}

/// One tensor's copy in device memory. The memory is freed when the last handle drops.
pub trait DeviceMemory: Any + Debug + Send + Sync {
    /// Bytes of device memory it takes.
    fn bytes(&self) -> u64;

    /// Address on the device. Equal addresses mean the same copy.
    fn address(&self) -> u64;

    /// State of the load.
    fn state(&self) -> LoadState;

    /// Calls `done` once the load has completed or failed, or at once if it already has. `done` must not block.
    fn when_decided(&self, done: Box<dyn FnOnce() + Send>);
}

/// State of a load. A load ends once, in `Resident` or `Failed`.
#[derive(Clone, Debug)]
pub enum LoadState {
    /// In flight.
    Loading,
    /// The values are on the device.
    Resident,
    /// The load failed: the copy is useless, and the next request makes a new one.
    Failed(BackendError),
}

impl DeviceTensor {
    /// Element type.
    pub fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    /// Rows: outputs of a projection.
    pub fn rows(&self) -> usize {
        self.tensor.shape().rows() as usize
    }

    /// Values per row: inputs of a projection.
    pub fn cols(&self) -> usize {
        self.tensor.shape().cols() as usize
    }

    /// Bytes of device memory, beyond the mapping.
    pub fn device_bytes(&self) -> u64 {
        match &self.storage {
            Storage::InPlace => 0,
            Storage::Device(memory) => memory.bytes(),
        }
    }

    /// State of its load.
    pub fn state(&self) -> LoadState {
        match &self.storage {
            Storage::InPlace => LoadState::Resident,
            Storage::Device(memory) => memory.state(),
        }
    }
}

/// The tensors of a program that a device has.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    /// By tensor number: those of the current part, and perhaps others.
    pub tensors: &'a [Option<DeviceTensor>],
    /// By part number: changes whenever a tensor of the part is loaded or evicted, and never repeats. Data that a
    /// device derives from addresses is valid while this number is the same.
    pub generations: &'a [u64],
}

impl<'a> Weights<'a> {
    /// A tensor of the current part.
    ///
    /// # Errors
    /// [`BackendError::Internal`] if it is absent: a bug of the caller.
    pub fn tensor(&self, id: TensorId) -> Result<&'a DeviceTensor, BackendError> {
        let there = self.tensors.get(id.0 as usize).and_then(Option::as_ref);
        there.ok_or_else(|| BackendError::Internal(format!("tensor {} was not loaded for its part", id.0)))
    }

    /// Whether the device has the tensor.
    pub fn has(&self, id: TensorId) -> bool {
        self.tensors.get(id.0 as usize).is_some_and(Option::is_some)
    }
}

/// Result of running a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The whole part is computed or submitted.
    Done,
    /// The part stopped at experts that rows chose and that are not resident. Holds their tensors, each once.
    Needs(Vec<TensorId>),
    /// The part has run for a while and is not done. The next call goes on; a suspension may come before it.
    Paused,
    /// The step was launched without a look at the experts that rows choose, and some are not resident. It continues with
    /// its first part, and looks now.
    Again,
}

/// Numbers of recurrent states are below this: two for each sequence that may run, and those that prefixes keep.
pub const RECURRENT_PLACES_MAX: u32 = 1 << 16;

/// Where a sequence's recurrent states are before and after a step: numbers in the model's pool of states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecurrentPlace {
    /// The states before the sequence's first row in the step; `None` if that is its first position. Several sequences may
    /// read one place.
    pub before: Option<u32>,
    /// The step writes the states after the sequence's last row here. No sequence reads the place in this step.
    pub after: u32,
}

/// Variable data of one step: plain arrays of numbers, ready to be copied to a device.
#[derive(Clone, Copy, Debug)]
pub struct StepBatch<'a> {
    /// Token of each row, below the vocabulary's size.
    pub token_ids: &'a [u32],
    /// Position of each row in its sequence. Positions of one sequence rise from row to row.
    pub positions: &'a [u32],
    /// Sequence of each row: an index into the page tables.
    pub row_sequences: &'a [u32],
    /// Page tables of the step's sequences, one after the other: `sequences * page_table_stride` page numbers. Each of these
    /// sequences has a row.
    /// Entry p of a sequence holds its positions `p * KV_PAGE_TOKENS ..`; entries past its length are not read.
    pub page_tables: &'a [u32],
    /// Entries per sequence in `page_tables`.
    pub page_table_stride: usize,
    /// Rows that ask for logits, rising.
    pub logits_rows: &'a [u32],
    /// Places of each sequence's states if the program [is recurrent](Program::is_recurrent), else empty. Rows of a sequence
    /// are then adjacent.
    pub recurrent: &'a [RecurrentPlace],
}

/// A change of one token's logit before a token is drawn. All numbers are finite, and `repeat` is above 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitChange {
    /// Token id, below the vocabulary's size.
    pub id: u32,
    /// Added first.
    pub bias: f32,
    /// Then a logit above 0 is divided by it, and any other multiplied.
    pub repeat: f32,
    /// Subtracted last.
    pub less: f32,
}

impl LogitChange {
    /// The changed logit. Each operation rounds once, so that all devices get the same bits.
    pub fn apply(&self, logit: f32) -> f32 {
        let biased = logit + self.bias;
        let scaled = if biased > 0.0 { biased / self.repeat } else { biased * self.repeat };
        scaled - self.less
    }
}

/// The tokens that may be drawn: bit `id % 32` of word `id / 32` is set for each. At least one is, of those in the vocabulary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenMask(Box<[u32]>);

impl TokenMask {
    /// A mask of these words. Tokens beyond them may not be drawn.
    pub fn new(words: impl Into<Box<[u32]>>) -> Self {
        Self(words.into())
    }

    /// Makes it the mask of these words, in the memory that it has if that fits.
    pub fn set(&mut self, words: &[u32]) {
        if self.0.len() == words.len() {
            self.0.copy_from_slice(words);
        } else {
            self.0 = words.into();
        }
    }

    /// Its words.
    pub fn words(&self) -> &[u32] {
        &self.0
    }

    /// Whether the token may be drawn.
    pub fn allows(&self, id: u32) -> bool {
        self.0.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }
}

/// The logit of a token that may not be drawn. It is finite, because a logit that is not shows a broken model.
pub const MASKED_LOGIT: f32 = f32::MIN;

/// How to draw the next token of a row. Plain numbers, so that a device can do it.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleRow {
    /// 0 takes the most likely token, the lowest id among equals; otherwise logits are divided by it.
    pub temperature: f32,
    /// Keep the k most likely; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of most likely tokens with at least this probability; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens below this share of the most likely one's probability; 0 drops none.
    pub min_p: f32,
    /// Seed of the sequence.
    pub seed: u64,
    /// The number of the drawn token among the prompt's and all drawn ones: its position, unless tokens were dropped. The
    /// random number depends on it and on `seed` only.
    pub position: u32,
    /// How many of the most likely tokens to report, with log-probabilities of the unmodified distribution; 0 for
    /// none.
    pub top_logprobs: u32,
    /// Changes of logits, before all else. No token is there twice.
    pub changes: Option<Arc<[LogitChange]>>,
    /// The tokens that may be drawn; `None` for all.
    pub mask: Option<Arc<TokenMask>>,
    /// Further samplers, which then draw; `None` for none.
    pub chain: Option<Chain>,
}

impl SampleRow {
    /// Whether the most likely token is taken. NaN counts as temperature 0.
    pub fn is_greedy(&self) -> bool {
        self.temperature.is_nan() || self.temperature <= 0.0
    }
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Token id.
    pub id: u32,
    /// Log-probability in the unmodified distribution if `top_logprobs > 0`, else 0.
    pub logprob: f32,
    /// The most likely tokens and their log-probabilities, in falling order.
    pub top: Vec<(u32, f32)>,
    /// Surprise in bits among the tokens that could be drawn, if a [`Chain`] drew it.
    pub surprise: Option<f32>,
}

/// Description of a backend.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendInfo {
    /// `cpu` or `hip`.
    pub kind: &'static str,
    /// Device name, as the processor's model name.
    pub device: String,
    /// Instruction set in use, as `avx512vnni`, `avx2`, `portable`.
    pub isa: String,
    /// Compute threads.
    pub threads: usize,
    /// Rows from which on a step costs nearly as much as two steps of half as many rows.
    pub step_rows: usize,
    /// Sequences that are best run at once: with more, each waits longer, and hardly more tokens are made.
    pub sequences: usize,
    /// Form of the activations that quantised weights meet.
    pub activations: ActivationType,
    /// KV cache element type.
    pub kv: KvType,
    /// Further facts for the user, as names and values: driver, memory, how weights are loaded, why no other device
    /// is used.
    pub notes: Vec<(&'static str, String)>,
}

/// One upload path for weights and its measured rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UploadRate {
    /// Name; empty if this entry is unused.
    pub path: &'static str,
    /// Upload threads.
    pub threads: u16,
    /// Bytes in the measurement. The first bytes and short tensors do not count.
    pub bytes: u64,
    /// Time in which those bytes were in flight.
    pub busy: Duration,
    /// True if the next uploads take this path.
    pub in_use: bool,
    /// True if the driver refused this path.
    pub refused: bool,
}

impl UploadRate {
    /// Bytes per second; 0 if nothing took this path.
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

/// A device's memory in bytes: what this process has taken, by owner, and what the driver and kernel report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemoryUse {
    /// Copies of weights.
    pub weights: u64,
    /// KV pages.
    pub kv: u64,
    /// Activations between kernels, and the step's arrays.
    pub scratch: u64,
    /// Staging: upload data before it is laid out.
    pub staging: u64,
    /// Recorded graphs, measured as the drop in the driver's free memory when each was made.
    pub graphs: u64,
    /// Taken from the driver: the sum of the owners above, and memory cached for reuse.
    pub taken: u64,
    /// Most that may be taken: the configured budget, or the whole device.
    pub budget: u64,
    /// Size of the whole device, as the driver reports; 0 if it does not.
    pub total: u64,
    /// Free on the whole device, as the driver reports.
    pub free: u64,
    /// In use by all programs together, as the kernel counts; `None` if it does not.
    pub kernel_used: Option<u64>,
}

impl DeviceMemoryUse {
    /// Most that two counts of one device's memory may differ by. Beside the programs, the driver keeps page tables,
    /// firmware and screens, some 100 MB. A chunk or two may be taken or freed between two readings.
    pub const COUNTS_DIFFER_MAX: u64 = 1 << 30;

    /// Describes a contradiction of more than [`Self::COUNTS_DIFFER_MAX`], with the numbers. Our count may not exceed
    /// the kernel's, which covers all programs; the runtime's count should equal the kernel's.
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
                "the runtime says {runtime} MiB are in use, the kernel {kernel} MiB: free memory is not known to within {bound} MiB"
            )
        })
    }

    /// Bytes in use by this process's owners.
    pub fn used(&self) -> u64 {
        self.weights + self.kv + self.scratch + self.staging + self.graphs
    }

    /// Bytes still available: free at the driver and within the budget, plus cached memory.
    pub fn available(&self) -> u64 {
        let kept = self.taken.saturating_sub(self.used());
        self.free.min(self.budget.saturating_sub(self.taken)) + kept
    }

    /// Bytes that other programs and the driver itself use.
    pub fn others(&self) -> u64 {
        self.total.saturating_sub(self.free).saturating_sub(self.taken)
    }
}

/// Counters since a device was opened. Zeros where weights are read in place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounters {
    /// Tensors uploaded to the device.
    pub uploads: u64,
    /// Bytes read from files for uploads.
    pub upload_bytes: u64,
    /// Loads that failed.
    pub upload_failures: u64,
    /// Upload paths and their rates.
    pub upload_rates: [UploadRate; 4],
    /// Steps whose layers ran as one replay of a recorded graph.
    pub graph_replays: u64,
    /// Graphs recorded.
    pub graphs: u64,
    /// Why graph replay was switched off.
    pub graphs_refused: Option<&'static str>,
    /// Number of steps run again, because rows chose experts that were not resident.
    pub steps_repeated: u64,
    /// Bytes of device memory in use: weights, KV pages, scratch.
    pub used_bytes: u64,
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
