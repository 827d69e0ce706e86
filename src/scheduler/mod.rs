//! The order in which sequences run, and the one loop that runs them.
//!
//! Three machines are pure, with no I/O, no device and no clock but the instants they are given: `schedule` (queues, turns, KV
//! pages, credits), `life` (a model on a device) and `loads` (weights that clients asked for). `residency` decides which
//! weights are on the device: a tensor's load begins there. `device` holds these beside the backend; `core` is the loop of the
//! engine thread, which owns it all. `engine` starts and stops that thread; `step` carries one batch down the layers;
//! `handle` is the engine as sessions see it.
//!
//! A sequence's life: `Queued -> Prefill (in chunks) -> Decode -> Done | Cancelled | Failed`. It owns KV pages from
//! admission to its end; while its credit is 0 it keeps them and is passed over.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::{BackendError, KV_PAGE_TOKENS};
use crate::model::Model;
use crate::tensor::MapError;

mod core;
mod device;
mod engine;
mod handle;
mod life;
mod loading;
mod loads;
mod pages;
mod plan;
mod residency;
mod resident;
mod schedule;
mod sequence;
mod snapshot;
mod step;
mod text;

pub use self::core::orders::{Cleared, RulesChange};
pub use engine::{Engine, EngineError};
pub use handle::{EngineHandle, EngineOptions};
pub use loading::{LoadProgress, LoadedTensor, Loading, Preload};
pub use plan::{Fit, Leaving, ResidencyPlan};
pub use residency::ResidencyRules;
pub use snapshot::{
    Counters, EngineEvent, EngineSnapshot, LoadingProgress, ModelResidency, PartState, SequenceSnapshot,
    SequenceState,
};

/// Number of a sequence, unique while the daemon runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// How tokens are drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 drops none.
    pub min_p: f32,
    /// Decides every draw of the sequence.
    pub seed: u64,
    /// Log-probabilities of this many most likely tokens with each token; 0 for none.
    pub top_logprobs: u32,
}

/// A valid request for tokens: checked against the model before it gets here.
#[derive(Debug)]
pub struct Job {
    /// Its number.
    pub id: SequenceId,
    /// Who pays.
    pub uid: u32,
    /// What runs.
    pub model: Arc<Model>,
    /// Prompt tokens: at least one, each below the vocabulary's size, fewer than `context_tokens`.
    pub prompt: Vec<u32>,
    /// Most tokens to generate, as asked for; at least 1. It may be more than the context has room for: the answer then
    /// ends with [`StopReason::ContextFull`].
    pub max_tokens: u32,
    /// The context in force: the model's own within the configured limit. KV pages are reserved for prompt +
    /// `max_tokens` within it only.
    pub context_tokens: u32,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// The answer ends before the first of these texts.
    pub stop: Vec<String>,
    /// Go on past end-of-generation tokens (measurements, references).
    pub ignore_eog: bool,
    /// The request fails with `DeadlineExceeded` after this moment.
    pub deadline: Option<Instant>,
    /// When the request arrived.
    pub arrived: Instant,
    /// How many [`Event::Tokens`] may be sent before more credit comes.
    pub credit: u32,
    /// Where events go. Never waits: at most `credit` items are under way.
    pub events: tokio::sync::mpsc::UnboundedSender<Event>,
}

impl Job {
    /// Most tokens that an answer to a prompt of `prompt_tokens` can have.
    fn answer_tokens(&self, prompt_tokens: u32) -> u32 {
        self.max_tokens.min(self.context_tokens.saturating_sub(prompt_tokens))
    }

    /// Positions that the sequence can come to fill.
    pub fn positions(&self) -> u32 {
        let prompt = u32::try_from(self.prompt.len()).unwrap_or(u32::MAX);
        prompt.saturating_add(self.max_tokens).min(self.context_tokens)
    }

    /// The promises of the fields above. Sessions answer for them with better words; this is the last guard.
    fn check(&self) -> Result<(), JobError> {
        let invalid = |why| Err(JobError::Invalid(why));
        if self.prompt.is_empty() {
            return invalid("the prompt has no token");
        }
        if self.max_tokens == 0 {
            return invalid("no token is asked for");
        }
        if self.prompt.len() as u64 >= u64::from(self.context_tokens) {
            return invalid("the prompt leaves no room for an answer in the context");
        }
        if self.prompt.iter().any(|&id| id as usize >= self.model.plan.program.vocab()) {
            return invalid("a token id outside the vocabulary");
        }
        Ok(())
    }
}

/// KV pages that `positions` tokens need.
pub(crate) fn sequence_pages(positions: u32) -> u32 {
    positions.div_ceil(KV_PAGE_TOKENS as u32)
}

/// What an engine tells a session about a sequence. The last one is `Done` or `Failed`, always.
#[derive(Debug)]
pub enum Event {
    /// New tokens; takes one credit.
    Tokens(TokenBatch),
    /// The answer is over.
    Done(Outcome),
    /// There will be no (more) answer.
    Failed(JobError),
}

/// Tokens of one or more steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenBatch {
    /// Their ids. A stop text's tokens are reported too, its text is not.
    pub ids: Vec<u32>,
    /// Text that is complete by now: never ends inside a UTF-8 character, holds back what may become a stop text.
    pub text: String,
    /// With `top_logprobs`: for each id its log-probability and the most likely tokens.
    pub logprobs: Vec<TokenLogprob>,
}

/// Log-probabilities of one drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Of the drawn token.
    pub logprob: f32,
    /// The most likely tokens, falling.
    pub top: Vec<(u32, f32)>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// An end-of-generation token.
    EndOfGeneration,
    /// `max_tokens` were generated.
    MaxTokens,
    /// The context was full before `max_tokens` were generated.
    ContextFull,
    /// A stop text came.
    StopText,
}

/// How an answer ended and what it took.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Why it ended.
    pub reason: StopReason,
    /// Text not yet sent in a batch.
    pub text: String,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub generated_tokens: u32,
    /// From arrival to admission.
    pub queue: Duration,
    /// What its steps waited for weights on their way to the device, until its first token; what was computed meanwhile is
    /// not in it.
    pub load: Duration,
    /// From admission to the first token, without `load`.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

/// Why a sequence failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum JobError {
    /// The client took it back or went away.
    #[error("cancelled")]
    Cancelled,
    /// Its deadline passed.
    #[error("the deadline passed after {generated_tokens} tokens")]
    DeadlineExceeded {
        /// Tokens generated by then.
        generated_tokens: u32,
    },
    /// It can never fit.
    #[error(
        "the KV cache for {context_tokens} tokens needs {need_bytes} bytes; the budget is {budget_bytes} bytes: ask for fewer tokens or raise kv.budget_mib"
    )]
    DoesNotFit {
        /// Positions asked for.
        context_tokens: u32,
        /// Their bytes.
        need_bytes: u64,
        /// The budget.
        budget_bytes: u64,
    },
    /// Too many wait already.
    #[error("{queued} requests wait already, the limit is {limit}: try again later")]
    QueueFull {
        /// Waiting.
        queued: u32,
        /// Limit.
        limit: u32,
    },
    /// The daemon is stopping.
    #[error("the daemon is stopping")]
    Draining,
    /// The client took nothing for too long.
    #[error("the client gave no credit for {waited_s} s")]
    SlowReader {
        /// How long.
        waited_s: u64,
    },
    /// The model's file changed or lost bytes.
    #[error("{0}")]
    Model(Arc<MapError>),
    /// The device's memory has no room for it, and nothing on it may leave.
    #[error(
        "{what} needs {} of the device's memory: {} of {} are free; {held}. Unload, unpin or clear a model, or raise \
         device.memory_mib", Bytes(*need_bytes), Bytes(*free_bytes), Bytes(*budget_bytes)
    )]
    NoRoom {
        /// A tensor, KV pages, activations.
        what: String,
        /// Bytes that it needs.
        need_bytes: u64,
        /// Bytes that could still be taken.
        free_bytes: u64,
        /// Most that may be taken.
        budget_bytes: u64,
        /// Who has the rest, in words.
        held: String,
    },
    /// A layer was asked for by a number that is too high.
    #[error("the model has no layer {layer}: they are counted from 0, and there are {layers}")]
    NoSuchLayer {
        /// The number.
        layer: u32,
        /// Layers of the model.
        layers: u32,
    },
    /// The device failed, or has no arithmetic for a tensor's type.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A promise of [`Job`] was not kept: a bug of ours in a session.
    #[error("internal error: {0}")]
    Invalid(&'static str),
    /// A bug of ours: the step panicked. Others are served on.
    #[error("internal error in a step: {0}")]
    Panicked(String),
}

/// Bytes for people.
struct Bytes(u64);

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            bytes if bytes < 1 << 20 => write!(f, "{bytes} bytes"),
            bytes => write!(f, "{:.1} MiB", bytes as f64 / f64::from(1u32 << 20)),
        }
    }
}

impl From<MapError> for JobError {
    fn from(source: MapError) -> Self {
        Self::Model(Arc::new(source))
    }
}

#[cfg(test)]
mod tests;
