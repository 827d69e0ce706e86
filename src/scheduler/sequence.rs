//! One sequence: its request, its tokens, its KV pages, and the answer that comes of them.
//!
//! Positions `0..computed` lie in the KV cache. `tokens` are known: the prompt, then the drawn ones. When a step computes the
//! last known one, its logits give the next token.

use std::time::{Duration, Instant};

use super::text::AnswerText;
use super::{
    Event, Job, Outcome, SequenceId, SequenceState, StopReason, TokenBatch, TokenLogprob, sequence_pages,
};
use crate::backend::{KV_PAGE_TOKENS, SampleRow, Sampled};
use crate::model::ModelId;

/// What decides when a sequence runs.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub id: SequenceId,
    pub model: ModelId,
    /// Bytes of one KV page of the model: above 0.
    pub page_bytes: u64,
    /// At least 1.
    pub prompt_tokens: u32,
    /// Positions it can come to fill, the prompt's among them. Their pages fit the budget.
    pub positions: u32,
    pub credit: u32,
    pub deadline: Option<Instant>,
}

/// A live sequence. `A` is its [`Answer`]; tests of the schedule alone need none.
#[derive(Debug)]
pub(super) struct Sequence<A = Answer> {
    pub request: Request,
    /// Prompt and drawn tokens.
    pub tokens: Vec<u32>,
    /// Tokens in the KV cache.
    pub computed: u32,
    /// KV pages in order of position.
    pub pages: Vec<u32>,
    /// Tokens that its client will take.
    pub credit: u32,
    /// Since when, admitted, it has had no credit.
    pub stalled: Option<Instant>,
    pub answer: A,
}

impl<A> Sequence<A> {
    pub fn new(request: Request, prompt: Vec<u32>, answer: A) -> Self {
        let credit = request.credit;
        Self { request, tokens: prompt, computed: 0, pages: Vec::new(), credit, stalled: None, answer }
    }

    /// KV bytes of all positions that it can come to fill.
    pub fn reserved_bytes(&self) -> u64 {
        u64::from(sequence_pages(self.request.positions)).saturating_mul(self.request.page_bytes)
    }

    /// Known tokens: `Job::check` bounds a prompt by `context_tokens`, and a drawn token has a position.
    pub fn token_count(&self) -> u32 {
        self.tokens.len() as u32
    }

    pub fn generated_tokens(&self) -> u32 {
        self.token_count() - self.request.prompt_tokens
    }

    /// Known tokens that no step has computed.
    pub fn pending(&self) -> u32 {
        self.token_count() - self.computed
    }

    /// True when it continues its answer; false while it takes in its prompt, or all its tokens anew.
    pub fn decodes(&self) -> bool {
        self.token_count() > self.request.prompt_tokens && self.pending() == 1
    }

    pub fn is_runnable(&self) -> bool {
        self.credit > 0
    }

    /// The state of an admitted sequence.
    pub fn state(&self) -> SequenceState {
        match self {
            _ if !self.is_runnable() => SequenceState::Stalled,
            _ if self.decodes() => SequenceState::Decode,
            _ => SequenceState::Prefill,
        }
    }

    /// True when its pages have no room for `rows` more positions.
    pub fn needs_page(&self, rows: u32) -> bool {
        self.pages.len() * KV_PAGE_TOKENS < (self.computed + rows) as usize
    }

    /// Notes that a step computed `rows` of it, and the token that was drawn from the last one.
    pub fn advance(&mut self, rows: u32, drawn: Option<u32>, now: Instant) {
        self.computed += rows;
        if let Some(token) = drawn {
            self.tokens.push(token);
            self.credit = self.credit.saturating_sub(1);
            self.stalled = (self.credit == 0).then_some(now);
        }
    }
}

/// What comes of a sequence: its job, the text so far, and how long it took.
#[derive(Debug)]
pub(super) struct Answer {
    pub job: Job,
    text: AnswerText,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    /// Time that its steps waited for weights, until its first token.
    load: Duration,
}

impl Sequence {
    /// A sequence for a job whose model has KV pages of `page_bytes`.
    pub fn of(mut job: Job, page_bytes: u64) -> Self {
        let request = Request {
            id: job.id,
            model: job.model.id,
            page_bytes,
            prompt_tokens: job.prompt.len() as u32, // `Job::check`: at most `context_tokens`
            positions: job.positions(),
            credit: job.credit,
            deadline: job.deadline,
        };
        let (prompt, text) = (std::mem::take(&mut job.prompt), AnswerText::new(&job.stop));
        let (admitted, first_token, last_token) = (None, None, None);
        let answer = Answer { job, text, admitted, first_token, last_token, load: Duration::ZERO };
        Self::new(request, prompt, answer)
    }

    /// Most tokens that the answer can have.
    pub fn answer_tokens(&self) -> u32 {
        self.answer.job.answer_tokens(self.request.prompt_tokens)
    }

    pub fn admit(&mut self, now: Instant) {
        self.answer.admitted = Some(now);
    }

    /// Notes time that a step of this sequence waited for weights.
    pub fn add_load(&mut self, load: Duration) {
        if self.answer.first_token.is_none() {
            self.answer.load += load;
        }
    }

    /// How its next token is drawn.
    pub fn sample_row(&self) -> SampleRow {
        let sampling = &self.answer.job.sampling;
        SampleRow {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            seed: sampling.seed,
            position: self.token_count(),
            top_logprobs: sampling.top_logprobs,
        }
    }

    /// The event for a token that [`Sequence::advance`] took, and the reason if the answer ends with it.
    pub fn accept(&mut self, sampled: Sampled, now: Instant) -> (TokenBatch, Option<StopReason>) {
        let (generated, known) = (self.generated_tokens(), u64::from(self.token_count()));
        let Answer { job, text, first_token, last_token, .. } = &mut self.answer;
        first_token.get_or_insert(now);
        *last_token = Some(now);
        let tokenizer = &job.model.tokenizer;
        let ends = !job.ignore_eog && tokenizer.is_end_of_generation(sampled.id);
        // Control tokens have no text; an id without an entry (a padded vocabulary) has none either.
        let bytes = tokenizer.token_bytes(sampled.id, false).unwrap_or(&[]);
        let new_text = if ends { String::new() } else { text.push(bytes) };
        let reason = match () {
            () if ends => Some(StopReason::EndOfGeneration),
            () if text.stopped() => Some(StopReason::StopText),
            // Before the full context: an answer that has all tokens asked for lacks none for want of room.
            () if generated >= job.max_tokens => Some(StopReason::MaxTokens),
            () if known >= u64::from(job.context_tokens) => Some(StopReason::ContextFull),
            () => None,
        };
        let logprobs = match job.sampling.top_logprobs {
            0 => Vec::new(),
            _ => vec![TokenLogprob { logprob: sampled.logprob, top: sampled.top }],
        };
        (TokenBatch { ids: vec![sampled.id], text: new_text, logprobs }, reason)
    }

    /// How the answer ended.
    pub fn outcome(&mut self, reason: StopReason) -> Outcome {
        let between = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
            (Some(from), Some(to)) => to.saturating_duration_since(from),
            _ => Duration::ZERO,
        };
        let generated_tokens = self.generated_tokens();
        let Answer { job, text, admitted, first_token, last_token, load } = &mut self.answer;
        Outcome {
            reason,
            text: text.finish(),
            prompt_tokens: self.request.prompt_tokens,
            generated_tokens,
            queue: between(Some(job.arrived), *admitted),
            load: *load,
            prefill: between(*admitted, *first_token).saturating_sub(*load),
            decode: between(*first_token, *last_token),
        }
    }

    /// Sends an event; false when the client has gone.
    pub fn send(&self, event: Event) -> bool {
        self.answer.job.events.send(event).is_ok()
    }

    /// True when the client has gone: no event reaches it.
    pub fn is_deaf(&self) -> bool {
        self.answer.job.events.is_closed()
    }
}
