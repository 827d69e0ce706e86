//! One sequence as the engine holds it: its job, its tokens, the text that comes of them, and how long it took.

use std::time::{Duration, Instant};

use super::text::AnswerText;
use super::{Event, Job, Outcome, StopReason, TokenBatch, TokenLogprob};
use crate::backend::{SampleRow, Sampled};

#[derive(Debug)]
pub(super) struct Sequence {
    pub job: Job,
    /// Prompt and drawn tokens.
    tokens: Vec<u32>,
    prompt_tokens: u32,
    text: AnswerText,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    /// Time that this sequence's steps waited for weights, until its first token.
    load: Duration,
}

impl Sequence {
    pub fn new(mut job: Job) -> Self {
        let tokens = std::mem::take(&mut job.prompt);
        let text = AnswerText::new(&job.stop);
        let prompt_tokens = tokens.len() as u32; // `Job::check`: at most `context_tokens`
        Self {
            job,
            tokens,
            prompt_tokens,
            text,
            admitted: None,
            first_token: None,
            last_token: None,
            load: Duration::ZERO,
        }
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    pub fn generated_tokens(&self) -> u32 {
        self.tokens.len() as u32 - self.prompt_tokens
    }

    /// Most tokens that the answer can have.
    pub fn answer_tokens(&self) -> u32 {
        self.job.answer_tokens(self.prompt_tokens)
    }

    pub fn admit(&mut self, now: Instant) {
        self.admitted = Some(now);
    }

    /// Notes time that a step of this sequence waited for weights.
    pub fn add_load(&mut self, load: Duration) {
        if self.first_token.is_none() {
            self.load += load;
        }
    }

    /// How its next token is drawn.
    pub fn sample_row(&self) -> SampleRow {
        let sampling = &self.job.sampling;
        SampleRow {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            seed: sampling.seed,
            position: self.tokens.len() as u32,
            top_logprobs: sampling.top_logprobs,
        }
    }

    /// Takes a drawn token in. Returns what to send, and the reason if the answer is over with it.
    pub fn accept(&mut self, sampled: Sampled, now: Instant) -> (TokenBatch, Option<StopReason>) {
        self.tokens.push(sampled.id);
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
        let tokenizer = &self.job.model.tokenizer;
        let ends = !self.job.ignore_eog && tokenizer.is_end_of_generation(sampled.id);
        let mut text = String::new();
        if !ends {
            // Control tokens have no text; an id without an entry (a padded vocabulary) has none either.
            text = self.text.push(tokenizer.token_bytes(sampled.id, false).unwrap_or(&[]));
        }
        let reason = match () {
            () if ends => Some(StopReason::EndOfGeneration),
            () if self.text.stopped() => Some(StopReason::StopText),
            // First: who gets all tokens that were asked for does not miss any for want of room.
            () if self.generated_tokens() >= self.job.max_tokens => Some(StopReason::MaxTokens),
            () if self.tokens.len() as u64 >= u64::from(self.job.context_tokens) => {
                Some(StopReason::ContextFull)
            }
            () => None,
        };
        let logprobs = match self.job.sampling.top_logprobs {
            0 => Vec::new(),
            _ => vec![TokenLogprob { logprob: sampled.logprob, top: sampled.top }],
        };
        (TokenBatch { ids: vec![sampled.id], text, logprobs }, reason)
    }

    /// How the answer ended.
    pub fn outcome(&mut self, reason: StopReason) -> Outcome {
        let between = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
            (Some(from), Some(to)) => to.saturating_duration_since(from),
            _ => Duration::ZERO,
        };
        Outcome {
            reason,
            text: self.text.finish(),
            prompt_tokens: self.prompt_tokens,
            generated_tokens: self.generated_tokens(),
            queue: between(Some(self.job.arrived), self.admitted),
            load: self.load,
            prefill: between(self.admitted, self.first_token).saturating_sub(self.load),
            decode: between(self.first_token, self.last_token),
        }
    }

    /// Sends an event; false when nobody listens any more.
    pub fn send(&self, event: Event) -> bool {
        self.job.events.send(event).is_ok()
    }
}
