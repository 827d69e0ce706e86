//! The options of Ollama's requests.

use rocmforge_client::wire::{AnswerForm, GenerateRequest, SamplingOptions};
use serde_json::Value;

use crate::failure::Failure;
use crate::params::{Params, is_empty};
use crate::steering::{Steering, ollama_penalties, samplers};

/// Values of requests without them, as the API has them.
const TEMPERATURE: f32 = 0.8;
const TOP_K: u32 = 40;
const TOP_P: f32 = 0.9;

/// Options of loading, and parts of options that are off here: none of them changes an answer.
const HARMLESS: [&str; 11] = [
    "num_thread",
    "num_gpu",
    "num_batch",
    "main_gpu",
    "use_mmap",
    "use_mlock",
    "low_vram",
    "numa",
    "f16_kv",
    "num_keep",
    "penalize_newline",
];

/// The options of a request.
#[derive(Debug)]
pub struct Chosen {
    sampling: SamplingOptions,
    max_tokens: u32,
    stop: Vec<String>,
    steering: Steering,
    /// Least tokens of context that the client counts on.
    pub context: Option<u32>,
}

impl Chosen {
    /// Takes the field `options`.
    ///
    /// # Errors
    /// Status 400 with the option at fault.
    pub fn take(params: &mut Params) -> Result<Self, Failure> {
        let options = params.take("options").unwrap_or_else(|| Value::Object(serde_json::Map::new()));
        let mut options = Params::inside("options", options)?;
        let sampling = SamplingOptions {
            temperature: options.number("temperature", 0.0..=100.0)?.unwrap_or(TEMPERATURE),
            top_k: options.whole("top_k", 0..=u32::MAX)?.unwrap_or(TOP_K),
            top_p: options.number("top_p", 0.0..=1.0)?.unwrap_or(TOP_P),
            min_p: options.number("min_p", 0.0..=1.0)?.unwrap_or(0.0),
            seed: seed(&mut options)?,
            top_logprobs: 0,
        };
        let max_tokens = num_predict(&mut options)?;
        let stop = options.stops("stop")?;
        let context = options.whole("num_ctx", 1..=u32::MAX)?;
        let penalties = ollama_penalties(&mut options)?;
        let samplers = samplers(&mut options)?;
        let steering = Steering { form: None, penalties, samplers };
        options.only("tfs_z", |value| value.as_f64() == Some(1.0))?;
        for name in ["vocab_only", "logits_all"] {
            options.only(name, is_empty)?;
        }
        options.drop_harmless(&HARMLESS);
        options.finish()?;
        Ok(Self { sampling, max_tokens, stop, steering, context })
    }

    /// The request with the options, and with the form of its answer.
    pub fn fill(self, request: GenerateRequest, form: Option<AnswerForm>) -> GenerateRequest {
        let Self { sampling, max_tokens, stop, steering, .. } = self;
        let request = GenerateRequest { sampling, max_tokens, stop, ..request };
        Steering { form, ..steering }.fill(request)
    }
}

/// Negative seeds stand for none.
fn seed(options: &mut Params) -> Result<Option<u64>, Failure> {
    match options.take("seed") {
        Some(value) if value.as_i64().is_some_and(i64::is_negative) => Ok(None),
        Some(value) => {
            let seed = value.as_u64();
            seed.map(Some).ok_or_else(|| options.refuse("seed", "it is not a whole number of 64 bits"))
        }
        None => Ok(None),
    }
}

/// Most new tokens; 0 to the end of the context, for which Ollama has -1 and -2.
fn num_predict(options: &mut Params) -> Result<u32, Failure> {
    const NAME: &str = "num_predict";
    match options.take(NAME) {
        None => Ok(0),
        Some(value) if value == -1 || value == -2 => Ok(0),
        Some(value) => match value.as_u64().and_then(|number| u32::try_from(number).ok()) {
            Some(number) if number > 0 => Ok(number),
            _ => Err(options.refuse(NAME, format!("{value} is neither -1, -2 nor in 1..={}", u32::MAX))),
        },
    }
}
