//! OpenAI's API: models, chat completions, completions, responses, embeddings.

mod chat;
mod chunks;
mod completions;
mod embeddings;
mod logprobs;
mod models;
mod responses;

pub use chat::chat_completions;
pub use completions::completions;
pub use embeddings::embeddings;
pub use models::{model, models};
pub use responses::{forget, respond, response};

use rocmforge_client::wire::{SamplingOptions, StopReason};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::generation::Ended;
use crate::params::Params;
use crate::steering::{Steering, grammar, openai_penalties, samplers};

/// Temperature of a request without one, as the API has it.
const TEMPERATURE: f32 = 1.0;

/// Most answers to one request: each is held whole, unless it is streamed, and takes one of the user's requests.
const COUNT_MAX: u32 = 8;

/// The last event of a stream.
const DONE: &str = "data: [DONE]\n\n";

/// Fields that change no answer: they are for the service's own books.
const HARMLESS: [&str; 7] = [
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "store",
];

/// Takes how tokens are drawn.
fn sampling(params: &mut Params) -> Result<SamplingOptions, Failure> {
    Ok(SamplingOptions {
        temperature: params.number("temperature", 0.0..=2.0)?.unwrap_or(TEMPERATURE),
        top_p: params.number("top_p", 0.0..=1.0)?.unwrap_or(1.0),
        // Not OpenAI's, but common among servers of this API.
        top_k: params.whole("top_k", 0..=u32::MAX)?.unwrap_or(0),
        min_p: params.number("min_p", 0.0..=1.0)?.unwrap_or(0.0),
        seed: params.seed("seed")?,
        top_logprobs: 0,
    })
}

/// The fields that chat completions and completions have in common.
struct Common {
    model: String,
    stream: bool,
    include_usage: bool,
    sampling: SamplingOptions,
    stop: Vec<String>,
    /// Answers that are wanted.
    count: u32,
    /// With the form of the answer only if that is a grammar.
    steering: Steering,
}

impl Common {
    fn take(params: &mut Params) -> Result<Self, Failure> {
        let model = params.required_text("model")?;
        let stream = params.flag("stream")?.unwrap_or(false);
        let include_usage = stream_options(params)?;
        let sampling = sampling(params)?;
        let stop = params.stops("stop")?;
        let count = params.whole("n", 1..=COUNT_MAX)?.unwrap_or(1);
        let (penalties, samplers) = (openai_penalties(params)?, samplers(params)?);
        let steering = Steering { form: grammar(params)?, penalties, samplers };
        params.only("service_tier", |tier| tier == "auto" || tier == "default")?;
        params.drop_harmless(&HARMLESS);
        Ok(Self { model, stream, include_usage, sampling, stop, count, steering })
    }
}

/// Whether the stream's usage is wanted.
fn stream_options(params: &mut Params) -> Result<bool, Failure> {
    let Some(options) = params.take("stream_options") else { return Ok(false) };
    let mut options = Params::inside("stream_options", options)?;
    let include_usage = options.flag("include_usage")?.unwrap_or(false);
    // Padding of events, against readers of the encrypted traffic.
    options.drop_harmless(&["include_obfuscation"]);
    options.finish()?;
    Ok(include_usage)
}

fn finish_reason(reason: StopReason) -> &'static str {
    match reason {
        StopReason::EndOfGeneration | StopReason::StopText => "stop",
        StopReason::MaxTokens | StopReason::ContextFull => "length",
    }
}

/// The usage of a request: its prompt counts once, and the tokens of all its answers.
fn usage<'a>(answers: impl IntoIterator<Item = &'a Ended>) -> Value {
    let (mut prompt, mut completion, mut reasoning, mut reused) = (0, 0, 0, None);
    for ended in answers {
        prompt = ended.usage.prompt_tokens;
        completion += u64::from(ended.usage.generated_tokens);
        reasoning += ended.reasoning_tokens;
        // The answers take each other's pages too, but only what was there before the request saved work of it.
        reused = Some(reused.map_or(ended.reused_tokens, |least: u64| least.min(ended.reused_tokens)));
    }
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": u64::from(prompt) + completion,
        "prompt_tokens_details": {"cached_tokens": reused.unwrap_or(0)},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    })
}

/// One event of a stream.
fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}
