//! Decides which sequence runs next, and runs the one loop that computes them.
//!
//! Three state machines are pure: `schedule` (queues, users' shares, credits), `life` (a model on a device) and
//! `loads` (weights that clients requested). They use no I/O, no device and no clock; callers pass in the instants.
//! `accounts` (device time by user), `costs` (how long a step takes) and `kv` (pages and known prefixes) are the
//! schedule's.
//! `residency` decides which weights are on the device and begins every tensor's load. `paging` reads the pages of weights
//! that a step uses in the file. `device` holds these beside the
//! backend. `core` is the loop of the engine thread, which owns all of it. `engine` starts and stops that thread,
//! `step` carries one batch through the layers, and `handle` is the sessions' view of the engine.
//!
//! A sequence's life: `Queued -> Prefill (in chunks) -> Decode -> Done | Cancelled | Failed`. A sequence takes KV pages
//! as it grows. At its end it leaves them to its user's later sequences that begin with the same tokens. While its
//! credit is 0 it is `Stalled`: the schedule skips it. A sequence whose place another user needs is `Queued` again and
//! prefills its tokens later.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::{BackendError, Chain, KV_PAGE_TOKENS};
use crate::cache::Lookups;
use crate::model::Model;
use crate::model::constraint::{Constraint, ConstraintError};
use crate::model::embedding::Pooler;
use crate::share::{Charge, Refusal};
use crate::tensor::MapError;

mod accounts;
mod core;
mod costs;
mod device;
mod draft;
mod drafter;
mod dry;
mod engine;
mod facts;
mod handle;
mod kv;
mod life;
mod loading;
mod loads;
mod masks;
mod paging;
mod penalties;
mod plan;
mod prefixes;
mod rates;
mod residency;
mod resident;
mod schedule;
mod sequence;
mod snapshot;
mod step;
mod swap;
mod text;

pub use self::core::orders::{Cleared, RulesChange};
pub use dry::Dry;
pub use engine::{Engine, EngineError};
pub use handle::{EngineHandle, EngineOptions};
pub use kv::Reuse;
pub use loading::{LoadProgress, LoadedTensor, Loading, Preload};
pub use paging::PageReader;
pub use penalties::Penalties;
pub use plan::{Fit, Leaving, ResidencyPlan};
pub use prefixes::{PrefixKeeper, PrefixPage, Prefixes};
pub use residency::ResidencyRules;
pub use snapshot::{
    Counters, EngineEvent, EngineSnapshot, LoadingProgress, ModelResidency, PartState, SequenceSnapshot,
    SequenceState,
};

/// Number of a sequence, unique while the daemon runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// Sampling parameters of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token.
    pub temperature: f32,
    /// Sample among this many most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Sample among the most likely tokens whose probabilities sum to this; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens below this fraction of the highest probability; 0 drops none.
    pub min_p: f32,
    /// Seed of all random draws of the sequence.
    pub seed: u64,
    /// Log-probabilities of this many most likely tokens with each token; 0 for none.
    pub top_logprobs: u32,
}

/// The aim of mirostat 2 (Basu et al., arXiv 2007.14966).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mirostat {
    /// Surprise of the drawn tokens in bits, on average.
    pub tau: f32,
    /// How fast the cut follows: so much of the difference for each token.
    pub eta: f32,
}

impl Mirostat {
    /// The cut before the first token.
    pub fn first(&self) -> f32 {
        2.0 * self.tau
    }

    /// The cut after a token of so much surprise.
    pub fn next(&self, cut: f32, surprise: f32) -> f32 {
        cut - self.eta * (surprise - self.tau)
    }
}

/// Limits of the choice of an answer's tokens, beside the sampling parameters. The default limits nothing.
#[derive(Debug, Default)]
pub struct Steering {
    /// Penalties for what was said, and biases.
    pub penalties: Option<Penalties>,
    /// A penalty for repetitions of whole runs of tokens.
    pub dry: Option<Dry>,
    /// Further samplers, without the state of mirostat.
    pub chain: Option<Chain>,
    /// Mirostat 2, in place of the samplers that cut.
    pub mirostat: Option<Mirostat>,
    /// The form of the answer; the answer ends when it is complete.
    pub constraint: Option<Constraint>,
    /// The user's share of the constraints of all users.
    pub held: Option<Charge>,
}

/// A valid request for tokens. The session has checked it against the model.
#[derive(Debug)]
pub struct Job {
    /// Number of the sequence.
    pub id: SequenceId,
    /// User id that is charged for the request.
    pub uid: u32,
    /// Number of the connection that the request came on: a user's connections take turns.
    pub connection: u64,
    /// Its place among the requests of the same user: higher ones first.
    pub priority: u8,
    /// The model to run.
    pub model: Arc<Model>,
    /// Prompt tokens: at least one, each below the vocabulary's size, fewer than `context_tokens`. An encoder's may be as many.
    pub prompt: Vec<u32>,
    /// Most tokens to generate, as requested; at least 1. If the context has room for fewer, the answer ends with
    /// [`StopReason::ContextFull`].
    pub max_tokens: u32,
    /// Context limit in tokens: the smaller of the model's own limit and the configured one. If the KV budget holds fewer
    /// and `max_tokens` reaches to this limit, the answer ends there with [`StopReason::ContextFull`].
    pub context_tokens: u32,
    /// When the context is full, the answer goes on without the oldest half of the tokens after so many first ones. `None`: it
    /// ends with [`StopReason::ContextFull`].
    pub shift: Option<u32>,
    /// Log-probabilities of the prompt's tokens are wanted, with so many alternatives.
    pub scores: Option<u32>,
    /// The embedding of the prompt is wanted, and no token.
    pub embedding: Option<Arc<Pooler>>,
    /// Most tokens that a step may draft, found in the sequence's own text or computed by `draft_model`; 0 for none. They do not change
    /// the answer. With mirostat there are none.
    pub drafts: u32,
    /// A smaller model with the same token ids that drafts. An answer of a given form has its drafts from its own text.
    pub draft_model: Option<Arc<Model>>,
    /// So many jobs with the same prompt follow at once.
    pub alike: u32,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Limits of the choice of tokens.
    pub steering: Steering,
    /// Control tokens that are part of the text nevertheless.
    pub marks: Vec<u32>,
    /// The answer ends before the first of these texts.
    pub stop: Vec<String>,
    /// Continue past end-of-generation tokens (measurements, references).
    pub ignore_eog: bool,
    /// The request fails with `DeadlineExceeded` after this moment.
    pub deadline: Option<Instant>,
    /// When the request arrived.
    pub arrived: Instant,
    /// How many [`Event::Tokens`] the engine may send before the client grants more.
    pub credit: u32,
    /// Receives the events. Sending never waits; at most `credit` token events are in flight.
    pub events: tokio::sync::mpsc::UnboundedSender<Event>,
}

impl Job {
    /// Most tokens that an answer to a prompt of `prompt_tokens` can have.
    fn answer_tokens(&self, prompt_tokens: u32) -> u32 {
        match self.shift {
            Some(_) => self.max_tokens,
            None => self.max_tokens.min(self.context_tokens.saturating_sub(prompt_tokens)),
        }
    }

    /// Most positions that the sequence can fill.
    pub fn positions(&self) -> u32 {
        let prompt = u32::try_from(self.prompt.len()).unwrap_or(u32::MAX);
        prompt.saturating_add(self.max_tokens).min(self.context_tokens)
    }

    /// Checks what the fields above promise. Sessions check the same and report it in better words; this is the last
    /// guard.
    fn check(&self) -> Result<(), JobError> {
        let invalid = |why| Err(JobError::Invalid(why));
        if self.prompt.is_empty() {
            return invalid("the prompt has no token");
        }
        if self.max_tokens == 0 {
            return invalid("max_tokens is 0");
        }
        let encodes = self.model.plan.program.encoder().is_some();
        if self.prompt.len() as u64 >= u64::from(self.context_tokens) + u64::from(encodes) {
            return invalid("the prompt leaves no room for an answer in the context");
        }
        if encodes && self.embedding.is_none() {
            return invalid("an encoder has no answers");
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

/// Events that an engine sends to a session about a sequence. The last event is always `Done` or `Failed`.
#[derive(Debug)]
pub enum Event {
    /// New tokens; costs one credit.
    Tokens(TokenBatch),
    /// The answer is complete.
    Done(Outcome),
    /// The request failed; no more tokens follow.
    Failed(JobError),
}

/// Tokens of one or more steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenBatch {
    /// Token ids. Includes the tokens of a stop text, although `text` does not.
    pub ids: Vec<u32>,
    /// Complete text so far. Never ends inside a UTF-8 character, and omits text that may be the beginning of a stop
    /// text.
    pub text: String,
    /// With `top_logprobs`: for each id its log-probability and the most likely tokens. With [`Job::scores`], batches without ids
    /// have those of the prompt's tokens, in order from the second one on.
    pub logprobs: Vec<TokenLogprob>,
}

impl TokenBatch {
    /// Adds the tokens of another one, which came after these.
    fn append(&mut self, other: Self) {
        self.ids.extend(other.ids);
        self.text.push_str(&other.text);
        self.logprobs.extend(other.logprobs);
    }
}

/// Log-probabilities of one sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Log-probability of the sampled token.
    pub logprob: f32,
    /// The most likely tokens and their log-probabilities, in falling order.
    pub top: Vec<(u32, f32)>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The model sampled an end-of-generation token, or its constraint is complete.
    EndOfGeneration,
    /// `max_tokens` were generated.
    MaxTokens,
    /// The context was full before `max_tokens` were generated.
    ContextFull,
    /// The answer contained a stop text.
    StopText,
}

/// How an answer ended, its size and its times.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Why it ended.
    pub reason: StopReason,
    /// Text not yet sent in a batch.
    pub text: String,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Those of them whose keys and values were there already.
    pub reused_tokens: u32,
    /// Tokens that steps computed for drafts.
    pub drafted_tokens: u32,
    /// Those of them that are the answer's.
    pub accepted_tokens: u32,
    /// Tokens generated.
    pub generated_tokens: u32,
    /// The embedding of the prompt, if it is wanted.
    pub embedding: Option<Vec<f32>>,
    /// Tokens that were dropped because the context was full.
    pub dropped_tokens: u32,
    /// Time from arrival to admission.
    pub queue: Duration,
    /// Time its steps waited for weights in flight, until its first token. Excludes load time that overlapped with
    /// computation.
    pub load: Duration,
    /// Weights that its steps asked the device's cache for, also those of sequences beside it in a step.
    pub lookups: Lookups,
    /// Time from admission to the first token, without `load`.
    pub prefill: Duration,
    /// Time from the first token to the last.
    pub decode: Duration,
}

/// Why a sequence failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum JobError {
    /// The client cancelled the request or disconnected.
    #[error("cancelled")]
    Cancelled,
    /// Its deadline passed.
    #[error("the deadline passed after {generated_tokens} tokens")]
    DeadlineExceeded {
        /// Tokens generated by then.
        generated_tokens: u32,
    },
    /// The request needs more KV cache than the whole budget.
    #[error(
        "the KV cache for {context_tokens} tokens needs {}; the budget is {}: ask for fewer tokens or raise kv.budget_mib",
        Bytes(*need_bytes), Bytes(*budget_bytes)
    )]
    DoesNotFit {
        /// Positions that the request may fill.
        context_tokens: u32,
        /// Bytes of KV cache that these positions need.
        need_bytes: u64,
        /// Bytes of KV cache that all models share.
        budget_bytes: u64,
    },
    /// An encoder reads a text in one step, whose values would need too much memory.
    #[error(
        "a text of {tokens} tokens needs {} for the values of its step, and may take {}: send a shorter text",
        Bytes(*need_bytes), Bytes(*most_bytes)
    )]
    WideText {
        /// Tokens of the text.
        tokens: usize,
        /// Bytes that its step needs.
        need_bytes: u64,
        /// Bytes that a step may take.
        most_bytes: u64,
    },
    /// The request needs more KV cache than one user may hold.
    #[error(
        "the KV cache for {context_tokens} tokens needs {}; one user may hold {}, which is {percent} % of it: ask for fewer \
         tokens or raise kv.percent_per_uid",
        Bytes(*need_bytes), Bytes(*share_bytes)
    )]
    AboveShare {
        /// Positions that the request may fill.
        context_tokens: u32,
        /// Bytes of KV cache that these positions need.
        need_bytes: u64,
        /// Bytes of KV cache that one user may hold.
        share_bytes: u64,
        /// The same in percent of the budget.
        percent: u32,
    },
    /// The queue has no place for this user.
    #[error("the queue is full: {}; try again later", .0.told(1, "waiting requests"))]
    NoPlace(Refusal),
    /// Too many loads or orders wait.
    #[error("{queued} requests wait already, the limit is {limit}: try again later")]
    QueueFull {
        /// Requests that wait.
        queued: u32,
        /// Most requests that may wait.
        limit: u32,
    },
    /// The daemon is stopping.
    #[error("the daemon is stopping")]
    Draining,
    /// The client granted no credit for too long.
    #[error("the client gave no credit for {waited_s} s")]
    SlowReader {
        /// Seconds without credit.
        waited_s: u64,
    },
    /// The model's file changed or lost bytes.
    #[error("{0}")]
    Model(Arc<MapError>),
    /// The device has too little free memory for the request, and nothing on it may be evicted.
    #[error(
        "{what} needs {} of the device's memory: {} of {} are free; {held}. Unload, unpin or clear a model, or raise \
         device.memory_mib", Bytes(*need_bytes), Bytes(*free_bytes), Bytes(*budget_bytes)
    )]
    NoRoom {
        /// The use of the memory: a tensor, KV pages or activations.
        what: String,
        /// Bytes that it needs.
        need_bytes: u64,
        /// Bytes that are still free.
        free_bytes: u64,
        /// Most bytes that the engine may use.
        budget_bytes: u64,
        /// Text that lists what holds the rest.
        held: String,
    },
    /// The request names a layer that the model does not have.
    #[error("the model has no layer {layer}: it has {layers} layers, counted from 0")]
    NoSuchLayer {
        /// The requested layer.
        layer: u32,
        /// Number of layers that the model has.
        layers: u32,
    },
    /// The device failed, or does not support a tensor's type.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The answer's constraint could not be followed.
    #[error(transparent)]
    Constraint(#[from] ConstraintError),
    /// A [`Job`] broke one of its promises: a bug in a session.
    #[error("internal error: {0}")]
    Invalid(&'static str),
    /// The step panicked: a bug in the engine. Other requests continue.
    #[error("internal error in a step: {0}")]
    Panicked(String),
}

/// Formats a byte count for users.
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
