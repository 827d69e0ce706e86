//! Messages of generation.

use serde::{Deserialize, Serialize};

use super::{EXT_CRITICAL, Ext, number};
use crate::wire::validate::{
    Validate, Violation, any, extensions, limits, list, nested, numbers, text, texts, validate,
};

/// Starts a generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequest {
    /// Model's name.
    pub model: String,
    /// The prompt.
    pub prompt: Prompt,
    /// Most tokens to generate; 0: to the end of the context.
    pub max_tokens: u32,
    /// How tokens are drawn.
    pub sampling: SamplingOptions,
    /// The answer ends before the first of these texts.
    pub stop: Vec<String>,
    /// Continue past end-of-generation tokens.
    pub ignore_eog: bool,
    /// Fails after this many milliseconds, including the time in the queue; 0: no deadline.
    pub timeout_ms: u32,
    /// Number chosen by the client, for logs.
    pub request_id: u128,
    /// Extensions.
    pub ext: Ext,
}

impl GenerateRequest {
    /// A request with the usual options: greedy, no limit but the context, no deadline.
    pub fn new(model: &str, prompt: Prompt) -> Self {
        Self {
            model: model.to_owned(),
            prompt,
            max_tokens: 0,
            sampling: SamplingOptions::default(),
            stop: Vec::new(),
            ignore_eog: false,
            timeout_ms: 0,
            request_id: 0,
            ext: Ext::new(),
        }
    }

    /// The same request, which goes on with the session of that name; a new name begins a session.
    #[must_use]
    pub fn with_session(mut self, name: &str) -> Self {
        self.ext.retain(|(key, _)| *key != EXT_GENERATE_SESSION);
        self.ext.push((EXT_GENERATE_SESSION, name.as_bytes().to_vec()));
        self
    }

    /// The same request, before those of its user with a lower number and after those with a higher one. Nothing changes for
    /// other users. Requests without a priority have [`PRIORITY`].
    #[must_use]
    pub fn with_priority(mut self, priority: u8) -> Self {
        self.ext.retain(|(key, _)| *key != EXT_GENERATE_PRIORITY);
        self.ext.push((EXT_GENERATE_PRIORITY, vec![priority]));
        self
    }

    /// Place of the request among those of its user: higher ones first. [`PRIORITY`] without one, and for bytes that are none.
    pub fn priority(&self) -> u8 {
        let of = self.ext.iter().find(|(key, _)| *key == EXT_GENERATE_PRIORITY);
        match of.map(|(_, bytes)| bytes.as_slice()) {
            Some([priority]) => *priority,
            _ => PRIORITY,
        }
    }

    /// The same request, whose answer goes on when the context is full: half of the oldest tokens are dropped, after the first
    /// `kept` ones.
    #[must_use]
    pub fn with_context_shift(mut self, kept: u32) -> Self {
        self.ext.retain(|(key, _)| *key != EXT_GENERATE_SHIFT);
        self.ext.push((EXT_GENERATE_SHIFT, kept.to_le_bytes().to_vec()));
        self
    }

    /// How many first tokens stay when the context is full, if the answer is to go on then. The same for bytes that are no
    /// number.
    pub fn context_shift(&self) -> Option<u32> {
        let (_, bytes) = self.ext.iter().find(|(key, _)| *key == EXT_GENERATE_SHIFT)?;
        bytes.as_slice().try_into().ok().map(u32::from_le_bytes)
    }

    /// The same request, of which a step may compute so many drafted tokens, at most [`limits::DRAFTS_MAX`]. They are found in the
    /// text of prompt and answer. The answer is the same, and comes sooner where the text repeats.
    #[must_use]
    pub fn with_drafts(mut self, most: u8) -> Self {
        self.ext.retain(|(key, _)| *key != EXT_GENERATE_DRAFTS);
        self.ext.push((EXT_GENERATE_DRAFTS, vec![most]));
        self
    }

    /// Most drafted tokens that a step may compute: 0 without a number, and for bytes that are none.
    pub fn drafts(&self) -> u8 {
        let of = self.ext.iter().find(|(key, _)| *key == EXT_GENERATE_DRAFTS);
        match of.map(|(_, bytes)| bytes.as_slice()) {
            Some([most]) => (*most).min(limits::DRAFTS_MAX),
            _ => 0,
        }
    }

    /// The same request, which so many more with the same prompt follow at once. The daemon then computes what they share once,
    /// also where the model's state after that is to be kept for it.
    #[must_use]
    pub fn with_alike(mut self, more: u8) -> Self {
        self.ext.retain(|(key, _)| *key != EXT_GENERATE_ALIKE);
        self.ext.push((EXT_GENERATE_ALIKE, vec![more]));
        self
    }

    /// How many requests with the same prompt follow: 0 without a number, and for bytes that are none.
    pub fn alike(&self) -> u8 {
        let of = self.ext.iter().find(|(key, _)| *key == EXT_GENERATE_ALIKE);
        match of.map(|(_, bytes)| bytes.as_slice()) {
            Some([more]) => *more,
            _ => 0,
        }
    }

    /// Name of the session that the request goes on with, if it names one.
    ///
    /// # Errors
    /// [`BadSessionName`] for a name that no session can have.
    pub fn session(&self) -> Result<Option<&str>, BadSessionName> {
        let Some((_, bytes)) = self.ext.iter().find(|(key, _)| *key == EXT_GENERATE_SESSION) else {
            return Ok(None);
        };
        let name = std::str::from_utf8(bytes).map_err(|_| BadSessionName)?;
        let fits = (1..=limits::LABEL_BYTES_MAX).contains(&name.len());
        if fits && !name.chars().any(char::is_control) { Ok(Some(name)) } else { Err(BadSessionName) }
    }
}

/// Key of [`GenerateRequest`]'s `ext`: name of the session that the request goes on with, as text.
pub const EXT_GENERATE_SESSION: u16 = EXT_CRITICAL | 1;

/// Key of [`GenerateRequest`]'s `ext`: u8, the request's place among those of its user.
pub const EXT_GENERATE_PRIORITY: u16 = 1;

/// Key of [`GenerateRequest`]'s `ext`: u32, how many first tokens stay when the context is full and the answer goes on.
pub const EXT_GENERATE_SHIFT: u16 = 2;

/// Key of [`GenerateRequest`]'s `ext`: u8, most drafted tokens that a step may compute.
pub const EXT_GENERATE_DRAFTS: u16 = 4;

/// Key of [`GenerateRequest`]'s `ext`: u8, how many requests with the same prompt follow at once.
pub const EXT_GENERATE_ALIKE: u16 = 5;

/// Priority of a request that states none.
pub const PRIORITY: u8 = 128;

/// A name that no session can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a session's name has 1 to {max} bytes of UTF-8 without control characters: give another name",
    max = limits::LABEL_BYTES_MAX
)]
pub struct BadSessionName;

/// A prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Prompt {
    /// Text, unchanged. Beginning-of-sequence is added if the model's file asks for it; special tokens are not
    /// recognised.
    Text(String),
    /// Token ids, unchanged; nothing is added.
    Ids(Vec<u32>),
    /// Messages, rendered by the model's chat template, with the generation prompt added.
    Chat(Vec<ChatMessage>),
}

/// One message of a chat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, or another role that the template knows.
    pub role: String,
    /// Text of the message.
    pub content: String,
}

/// How tokens are drawn. The daemon checks ranges: temperature 0..=100, `top_p` and `min_p` 0..=1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingOptions {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 drops none.
    pub min_p: f32,
    /// `None`: a random seed, reported in [`GenerateEnd`].
    pub seed: Option<u64>,
    /// Most likely tokens to report with each token, 0..=[`limits::TOP_LOGPROBS_MAX`]; 0: no log-probabilities.
    pub top_logprobs: u32,
}

impl Default for SamplingOptions {
    /// Greedy: temperature 0.
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: None, top_logprobs: 0 }
    }
}

/// New tokens of an answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerateItem {
    /// Ids of the tokens. A stop text's tokens are included, but its text is not in `text`.
    pub ids: Vec<u32>,
    /// Text that is complete so far; it ends at a character boundary.
    pub text: String,
    /// One for each of `ids`; empty without `top_logprobs`.
    pub logprobs: Vec<TokenLogprob>,
    /// The prompt's ids, in the first item only.
    pub prompt_ids: Vec<u32>,
    /// Extensions.
    pub ext: Ext,
}

/// Log-probabilities (natural logarithm) at one token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// Log-probability of the drawn token.
    pub logprob: f32,
    /// The most likely tokens, most likely first.
    pub top: Vec<TopToken>,
}

/// A likely token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TopToken {
    /// Its id.
    pub id: u32,
    /// Its log-probability.
    pub logprob: f32,
}

/// The answer is complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GenerateEnd {
    /// Why it ended.
    pub stop_reason: StopReason,
    /// Text that was not sent in an item.
    pub text: String,
    /// Token counts.
    pub usage: Usage,
    /// Times of the phases.
    pub timings: Timings,
    /// The seed used; with the same request it gives the same draws.
    pub seed: u64,
    /// Extensions.
    pub ext: Ext,
}

/// Key of [`GenerateEnd`]'s `ext`: prompt tokens whose keys and values were there already, as a little-endian u64; absent
/// for none.
pub const EXT_END_REUSED: u16 = 1;

/// Key of [`GenerateEnd`]'s `ext`: tokens that the session now has, as a little-endian u64; absent without a session.
pub const EXT_END_SESSION: u16 = 2;

/// Key of [`GenerateEnd`]'s `ext`: tokens that were dropped because the context was full, as a little-endian u64; absent for
/// none.
pub const EXT_END_DROPPED: u16 = 3;

/// Key of [`GenerateEnd`]'s `ext`: tokens that steps computed for drafts, as a little-endian u64; absent for none.
pub const EXT_END_DRAFTED: u16 = 5;

/// Key of [`GenerateEnd`]'s `ext`: those of them that are the answer's, as a little-endian u64; absent for none.
pub const EXT_END_ACCEPTED: u16 = 6;

/// Key of [`GenerateEnd`]'s `ext`: tensors that the request's steps asked for and the device had, as a little-endian u64;
/// absent for none.
pub const EXT_END_TENSORS_FOUND: u16 = 8;

/// Key of [`GenerateEnd`]'s `ext`: tensors whose loads the request's steps began, as a little-endian u64; absent for none.
pub const EXT_END_TENSORS_LOADED: u16 = 9;

/// Key of [`GenerateEnd`]'s `ext`: device bytes that these loads took, as a little-endian u64; absent for none.
pub const EXT_END_LOADED_BYTES: u16 = 10;

impl GenerateEnd {
    /// Tensors that the request's steps asked the device's cache for and found, resident or in flight. A step asks for none
    /// once its model's tensors are all known.
    pub fn tensors_found(&self) -> u64 {
        number(&self.ext, EXT_END_TENSORS_FOUND).unwrap_or(0)
    }

    /// Tensors whose loads the request's steps began, also for requests beside it in a step.
    pub fn tensors_loaded(&self) -> u64 {
        number(&self.ext, EXT_END_TENSORS_LOADED).unwrap_or(0)
    }

    /// Device bytes that these loads took; 0 where weights are read in place.
    pub fn loaded_bytes(&self) -> u64 {
        number(&self.ext, EXT_END_LOADED_BYTES).unwrap_or(0)
    }

    /// Tokens of prompt and answer that were dropped because the context was full.
    pub fn dropped_tokens(&self) -> u64 {
        number(&self.ext, EXT_END_DROPPED).unwrap_or(0)
    }

    /// Tokens that steps computed for drafts.
    pub fn drafted_tokens(&self) -> u64 {
        number(&self.ext, EXT_END_DRAFTED).unwrap_or(0)
    }

    /// Drafted tokens that are the answer's.
    pub fn accepted_tokens(&self) -> u64 {
        number(&self.ext, EXT_END_ACCEPTED).unwrap_or(0)
    }

    /// Tokens that the request's session now has; `None` without a session.
    pub fn session_tokens(&self) -> Option<u64> {
        number(&self.ext, EXT_END_SESSION)
    }

    /// Prompt tokens that were not computed, because an earlier prompt of the same user began with them.
    pub fn reused_tokens(&self) -> u64 {
        number(&self.ext, EXT_END_REUSED).unwrap_or(0)
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopReason {
    /// The model drew an end-of-generation token.
    EndOfGeneration,
    /// `max_tokens` were generated.
    MaxTokens,
    /// The context is full.
    ContextFull,
    /// The answer reached a stop text.
    StopText,
}

/// Token counts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub generated_tokens: u32,
}

/// Times of a request's phases, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timings {
    /// From arrival to admission.
    pub queue_us: u64,
    /// Time until the first token in which the request's steps waited for weights to load.
    pub load_us: u64,
    /// From admission to the first token, without `load_us`.
    pub prefill_us: u64,
    /// From the first token to the last.
    pub decode_us: u64,
}

validate!(GenerateRequest {
    model: text(limits::NAME_BYTES_MAX),
    prompt: nested,
    max_tokens: any,
    sampling: nested,
    stop: texts(limits::STOP_TEXTS_MAX, limits::STOP_TEXT_BYTES_MAX),
    ignore_eog: any,
    timeout_ms: any,
    request_id: any,
    ext: extensions,
});
validate!(ChatMessage { role: text(limits::ROLE_BYTES_MAX), content: text(limits::TEXT_BYTES_MAX) });
validate!(SamplingOptions {
    temperature: any,
    top_k: any,
    top_p: any,
    min_p: any,
    seed: any,
    top_logprobs: any,
});
validate!(GenerateItem {
    ids: numbers(limits::IDS_MAX),
    text: text(limits::TEXT_BYTES_MAX),
    logprobs: list(limits::IDS_MAX),
    prompt_ids: numbers(limits::IDS_MAX),
    ext: extensions,
});
validate!(TokenLogprob { logprob: any, top: list(limits::TOP_LOGPROBS_MAX) });
validate!(TopToken { id: any, logprob: any });
validate!(GenerateEnd {
    stop_reason: any,
    text: text(limits::TEXT_BYTES_MAX),
    usage: any,
    timings: any,
    seed: any,
    ext: extensions,
});

impl Validate for Prompt {
    fn validate(&self) -> Result<(), Violation> {
        match self {
            Self::Text(value) => text(limits::TEXT_BYTES_MAX)(value, ("Prompt", "Text")),
            Self::Ids(ids) => numbers(limits::IDS_MAX)(ids, ("Prompt", "Ids")),
            Self::Chat(messages) => list(limits::CHAT_MESSAGES_MAX)(messages, ("Prompt", "Chat")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_follow_are_a_number_in_a_byte() {
        let request = GenerateRequest::new("m", Prompt::Text("p".into()));
        assert_eq!((request.alike(), request.clone().with_alike(9).with_alike(255).alike()), (0, 255));
        let mut wrong = request;
        wrong.ext.push((EXT_GENERATE_ALIKE, vec![1, 0]));
        assert_eq!((wrong.alike(), wrong.validate()), (0, Ok(())));
    }

    #[test]
    fn drafts_are_a_number_in_a_byte() {
        let request = GenerateRequest::new("m", Prompt::Text("p".into()));
        assert_eq!(request.drafts(), 0);
        let asked = request.clone().with_drafts(3).with_drafts(16);
        assert_eq!((asked.drafts(), asked.ext.len(), asked.validate()), (16, 1, Ok(())));
        assert_eq!(request.clone().with_drafts(255).drafts(), limits::DRAFTS_MAX);
        for bytes in [vec![], vec![1, 0]] {
            let mut request = request.clone();
            request.ext.push((EXT_GENERATE_DRAFTS, bytes));
            assert_eq!(request.drafts(), 0);
        }
    }
}
