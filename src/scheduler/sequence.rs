//! One sequence: its request, its tokens, its KV pages and its answer.
//!
//! Positions `0..computed` lie in the KV cache. `tokens` holds the known tokens: the prompt, then the sampled ones.
//! When a step computes the last known token, its logits give the next one.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::draft::Draft;
use super::drafter::Drafter;
use super::facts::Sizes;
use super::kv::Held;
use super::masks::Masking;
use super::swap::Swapped;
use super::text::AnswerText;
use super::{
    Event, Job, Outcome, Penalties, SequenceId, SequenceState, StopReason, TokenBatch, TokenLogprob,
    sequence_pages,
};
use crate::backend::{BackendError, Chain, KV_PAGE_TOKENS, LogitChange, RecurrentPlace, SampleRow, Sampled};
use crate::cache::Lookups;
use crate::model::ModelId;
use crate::model::embedding::{Pooled, Pooling};

/// An admitted sequence can go on for so many tokens before it may take a page from another one. A sequence that gave its
/// pages up is admitted again only where it will not lose them at once.
pub(super) const RESERVE: u32 = 2 * KV_PAGE_TOKENS as u32;

/// Recurrent states of a sequence: the one that its next step reads, and the one that it writes.
pub(super) const STATES: u64 = 2;

/// The values that decide when a sequence runs.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub id: SequenceId,
    /// The user that is charged.
    pub uid: u32,
    /// Number of the user's connection.
    pub connection: u64,
    /// Its place among the requests of the user: higher ones first.
    pub priority: u8,
    pub model: ModelId,
    /// Bytes of one KV page of the model; above 0.
    pub page_bytes: u64,
    /// Bytes of one recurrent state of the model; 0 for most.
    pub state_bytes: u64,
    /// At least 1.
    pub prompt_tokens: u32,
    /// Most positions that it can fill, with the prompt's. Their pages fit the budget.
    pub positions: u32,
    pub credit: u32,
    pub deadline: Option<Instant>,
    /// Log-probabilities of the prompt's tokens are wanted.
    pub scores: bool,
    /// The prompt's embedding is wanted, and no token.
    pub embeds: Option<Pooling>,
    /// Most drafted tokens at once; 0 for none.
    pub drafts: u32,
    /// So many requests with the same prompt follow.
    pub alike: u32,
    /// Most rows of a step of the model.
    pub rows_max: u32,
    /// Host memory that the values of a row take; 0 where they are on a device.
    pub row_bytes: u64,
    /// The model is an encoder: a step takes all rows of the prompt, and nothing of it is known from others.
    pub whole: bool,
}

/// A live sequence. `A` is its [`Answer`]; tests of the schedule alone use `()`.
#[derive(Debug)]
pub(super) struct Sequence<A = Answer> {
    pub request: Request,
    /// Prompt and sampled tokens, without those that were dropped.
    pub tokens: Vec<u32>,
    /// Tokens that were dropped because the context was full.
    pub dropped: u32,
    /// Tokens in the KV cache.
    pub computed: u32,
    /// Rows of the prompt whose log-probabilities of the next token were told.
    pub scored: u32,
    /// Rows of the prompt that are in its embedding.
    pub embedded: u32,
    /// Tokens that may follow; a step may compute them with the last known one.
    pub draft: Draft,
    /// The draft model that computes these tokens, if it has one.
    pub drafter: Option<Drafter>,
    /// KV pages in order of position.
    pub kv: Held,
    /// Its pages in host memory, from when it was parked until it is admitted again.
    pub swapped: Swapped,
    /// No step has computed a row of it since its admission.
    pub fresh: bool,
    /// The state of its tree when its known prefix was last looked up there.
    pub looked: Option<u64>,
    /// Tokens of its prompt that were known when its first row was computed; `None` before that.
    pub reused: Option<u32>,
    /// Token events that its client has granted and not yet received.
    pub credit: u32,
    /// The instant since which it has had no credit after its admission.
    pub stalled: Option<Instant>,
    /// Number in the order of arrival.
    pub arrival: u64,
    /// The instant since which it waits in the queue.
    pub queued: Option<Instant>,
    /// The instant of its first admission.
    pub first_admitted: Option<Instant>,
    /// The instant of its last admission; `None` while it waits.
    pub admitted: Option<Instant>,
    /// The instant at which it first sampled a token after its last admission.
    pub ready: Option<Instant>,
    /// Number of the last step that took rows of it.
    pub served: u64,
    /// How often it lost its computed positions.
    pub restarts: u32,
    /// Device time charged for it.
    pub device_time: Duration,
    pub answer: A,
}

impl<A> Sequence<A> {
    pub fn new(request: Request, prompt: Vec<u32>, answer: A) -> Self {
        let (credit, draft) = (request.credit, Draft::new(request.drafts));
        Self {
            request,
            tokens: prompt,
            dropped: 0,
            computed: 0,
            scored: 0,
            embedded: 0,
            draft,
            drafter: None,
            kv: Held::default(),
            swapped: Swapped::default(),
            fresh: true,
            looked: None,
            reused: None,
            credit,
            stalled: None,
            arrival: 0,
            queued: None,
            first_admitted: None,
            admitted: None,
            ready: None,
            served: 0,
            restarts: 0,
            device_time: Duration::ZERO,
            answer,
        }
    }

    /// True if the model is its own, or drafts for it.
    pub fn uses(&self, model: ModelId) -> bool {
        self.request.model == model || self.drafter.as_ref().is_some_and(|drafter| drafter.model == model)
    }

    /// Forgets its computed positions and pages: it prefills all its known tokens again. The pages are not given back.
    pub fn restart(&mut self) {
        self.computed = 0;
        self.kv = Held::default();
        self.forget_draft();
        (self.fresh, self.looked, self.ready) = (true, None, None);
        self.restarts = self.restarts.wrapping_add(1);
    }

    /// Forgets the tokens that may follow.
    fn forget_draft(&mut self) {
        let tokens = self.token_count();
        self.draft.clear();
        if let Some(drafter) = &mut self.drafter {
            drafter.cut(tokens);
        }
    }

    /// Drops the oldest half of its tokens after the first `kept` ones, at least one. All others get new positions, so it
    /// prefills them like a new sequence. At most half of the tokens are kept. Its pages are not given back.
    pub fn drop_oldest(&mut self, kept: u32) {
        let kept = (kept as usize).min(self.tokens.len() / 2);
        let gone = ((self.tokens.len() - kept) / 2).max(1);
        self.tokens.drain(kept..(kept + gone).min(self.tokens.len()));
        self.dropped = self.dropped.saturating_add(gone as u32);
        self.swapped.clear();
        self.restart();
    }

    /// Pages that it has or is to have soon: those of its known tokens and of [`RESERVE`] more.
    pub fn claimed_pages(&self) -> u32 {
        let positions = self.token_count().saturating_add(RESERVE).min(self.request.positions);
        sequence_pages(positions).max(self.kv.pages.len() as u32)
    }

    /// Bytes of its claimed pages.
    pub fn claimed_bytes(&self) -> u64 {
        let pages = u64::from(self.claimed_pages()).saturating_mul(self.request.page_bytes);
        pages.saturating_add(self.request.state_bytes.saturating_mul(STATES))
    }

    /// Bytes of the pages and recurrent states that it has.
    pub fn held_bytes(&self) -> u64 {
        let pages = (self.kv.pages.len() as u64).saturating_mul(self.request.page_bytes);
        pages.saturating_add(self.request.state_bytes.saturating_mul(self.states()))
    }

    /// Recurrent states that it has.
    pub fn states(&self) -> u64 {
        u64::from(self.kv.state.is_some()) + u64::from(self.kv.spare.is_some())
    }

    /// Bytes of claimed pages that it does not have yet.
    pub fn outstanding_bytes(&self) -> u64 {
        let pages = self.claimed_pages().saturating_sub(self.kv.pages.len() as u32);
        let pages = u64::from(pages).saturating_mul(self.request.page_bytes);
        pages.saturating_add(self.request.state_bytes.saturating_mul(STATES - self.states()))
    }

    /// True if rows need a recurrent state.
    pub fn is_recurrent(&self) -> bool {
        self.request.state_bytes > 0
    }

    /// True when its next step has nowhere to write its recurrent state.
    pub fn needs_state(&self) -> bool {
        self.is_recurrent() && self.kv.spare.is_none()
    }

    /// Where its recurrent state is before and after its next step.
    pub fn recurrent_place(&self) -> Option<RecurrentPlace> {
        Some(RecurrentPlace { before: self.kv.state.filter(|_| self.computed > 0), after: self.kv.spare? })
    }

    /// Number of known tokens. Fits a `u32`: `Job::check` bounds the prompt by `context_tokens`, and every sampled
    /// token has a position.
    pub fn token_count(&self) -> u32 {
        self.tokens.len() as u32
    }

    pub fn generated_tokens(&self) -> u32 {
        self.token_count().saturating_add(self.dropped).saturating_sub(self.request.prompt_tokens)
    }

    /// Rows of the prompt that are to tell the log-probability of their next token, and have not yet: those before the last one.
    pub fn unscored(&self) -> u32 {
        let last = if self.request.scores { self.request.prompt_tokens.saturating_sub(1) } else { 0 };
        last.saturating_sub(self.scored)
    }

    /// True while rows of the prompt are to be told of which others know no more than keys and values.
    pub fn needs_rows(&self) -> bool {
        let all = matches!(self.request.embeds, Some(Pooling::Mean | Pooling::First));
        self.unscored() > 0 || all || self.request.whole
    }

    /// Tokens of a known prefix that it may take: all but the last, or only those whose rows were told. None of an encoder's.
    pub fn reusable(&self) -> &[u32] {
        let told = if self.request.whole { 0 } else { self.scored.max(self.embedded) };
        let most = if self.needs_rows() { told } else { self.token_count().saturating_sub(1) };
        self.tokens.get(..most as usize).unwrap_or_default()
    }

    /// Number of known tokens that no step has computed.
    pub fn pending(&self) -> u32 {
        self.token_count() - self.computed
    }

    /// True while it continues its answer. False while it prefills its prompt, or all its tokens after a rewind.
    pub fn decodes(&self) -> bool {
        self.generated_tokens() > 0 && self.pending() == 1
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
        self.kv.pages.len() * KV_PAGE_TOKENS < (self.computed + rows) as usize
    }

    /// Records that a step computed `rows` rows, and the token sampled from the last one.
    pub fn advance(&mut self, rows: u32, drawn: Option<u32>, now: Instant) {
        self.reused.get_or_insert(self.computed);
        self.fresh = false;
        self.computed += rows;
        if let Some(token) = drawn {
            self.tokens.push(token);
            self.ready.get_or_insert(now);
            self.spend(now);
        }
    }

    /// True if the last known token is the drafted one of this place. It is computed then, and the token drawn behind it counts.
    pub fn take_drafted(&mut self, place: u32) -> bool {
        let drafted = self.draft.ids().get(place as usize);
        let taken = drafted.is_some() && drafted == self.tokens.last();
        self.computed += u32::from(taken);
        taken
    }

    /// Looks for the tokens that may follow, or asks its draft model for them. There are none where its text has no room for the
    /// token drawn after them.
    pub fn look_ahead(&mut self) {
        let room = self.request.positions.saturating_sub(self.token_count().saturating_add(1));
        let room = if self.decodes() { room } else { 0 };
        self.forget_draft();
        match self.drafter {
            Some(_) => self.draft.ask(room),
            None => self.draft.look(&self.tokens, room),
        }
    }

    /// Its known tokens and then those of its draft, from a position on.
    pub fn tokens_from(&self, start: u32) -> impl Iterator<Item = u32> {
        self.tokens.iter().chain(self.draft.ids()).skip(start as usize).copied()
    }

    /// Records that a step told the log-probabilities behind the rows before `end`.
    pub fn tell_scores(&mut self, end: u32, now: Instant) {
        self.scored = self.scored.max(end);
        self.spend(now);
    }

    /// So many of the last rows of a step, which computes `rows` rows, are to be in the embedding. Rows that were in it before
    /// the sequence was parked are not again.
    pub fn embeds(&self, rows: u32) -> u32 {
        match self.request.embeds {
            None => 0,
            Some(Pooling::Last) => u32::from(rows == self.pending()),
            Some(Pooling::Mean | Pooling::First) => {
                self.computed.saturating_add(rows).saturating_sub(self.embedded.max(self.computed))
            }
        }
    }

    /// Takes the credit of one event.
    fn spend(&mut self, now: Instant) {
        self.credit = self.credit.saturating_sub(1);
        self.stalled = (self.credit == 0).then_some(now);
    }
}

/// Added to the logit of a token that is known, so that it is drawn and its log-probability told.
const CERTAIN: f32 = 1e30;

/// The answer of a sequence: its job, its text so far and its times.
#[derive(Debug)]
pub(super) struct Answer {
    pub job: Job,
    /// The form of the answer.
    pub masking: Option<Arc<Masking>>,
    text: AnswerText,
    /// The embedding so far.
    pooled: Option<Pooled>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    /// Time that its steps waited for weights, until its first token.
    load: Duration,
    /// Weights that its steps asked for.
    lookups: Lookups,
    /// The cut of mirostat for the next token.
    mirostat: Option<f32>,
}

impl Sequence {
    /// Makes a sequence for a job.
    pub fn of(mut job: Job, sizes: Sizes) -> Self {
        let Sizes { page_bytes, state_bytes, row_bytes, rows_max } = sizes;
        let request = Request {
            id: job.id,
            uid: job.uid,
            connection: job.connection,
            priority: job.priority,
            model: job.model.id,
            page_bytes,
            state_bytes,
            prompt_tokens: job.prompt.len() as u32, // `Job::check`: at most `context_tokens`
            positions: job.positions(),
            credit: job.credit,
            deadline: job.deadline,
            scores: job.scores.is_some(),
            embeds: job.embedding.as_ref().map(|pooler| pooler.pooling),
            // The cut of mirostat follows from the surprise of the token before. A recurrent state has a refused token in it.
            drafts: if job.steering.mirostat.is_some() || state_bytes > 0 { 0 } else { job.drafts },
            alike: job.alike,
            rows_max,
            row_bytes,
            whole: job.model.plan.program.encoder().is_some(),
        };
        let (prompt, text) = (std::mem::take(&mut job.prompt), AnswerText::new(&job.stop));
        let (first_token, last_token, queued) = (None, None, Some(job.arrived));
        let masking = job.steering.constraint.take().map(|constraint| Masking::new(constraint, job.uid));
        let mirostat = job.steering.mirostat.map(|mirostat| mirostat.first());
        let (load, lookups) = (Duration::ZERO, Lookups::default());
        let pooled = job.embedding.clone().map(Pooled::new);
        let answer = Answer { job, masking, text, pooled, first_token, last_token, load, lookups, mirostat };
        Self { queued, ..Self::new(request, prompt, answer) }
    }

    /// Most tokens that the answer can have.
    pub fn answer_tokens(&self) -> u32 {
        self.answer.job.answer_tokens(self.request.prompt_tokens)
    }

    /// Adds the weights that a step of this sequence asked for, and the time that it waited for some.
    pub fn add_load(&mut self, load: Duration, lookups: Lookups) {
        self.answer.lookups += lookups;
        if self.answer.first_token.is_none() {
            self.answer.load += load;
        }
    }

    /// Sampling settings of the token behind the first `drafted` ones of its draft, without the mask of its constraint.
    pub fn sample_row(&self, drafted: u32) -> SampleRow {
        let Job { sampling, steering, model, .. } = &self.answer.job;
        let vocab = model.plan.program.vocab();
        let changes = (steering.penalties.is_some() || steering.dry.is_some()).then(|| {
            let ahead = self.draft.ids().get(..drafted as usize).unwrap_or_default();
            let tokens = match ahead {
                [] => Cow::Borrowed(&self.tokens),
                ahead => Cow::Owned([&self.tokens, ahead].concat()),
            };
            let generated = self.generated_tokens().min(self.token_count()).saturating_add(drafted);
            let bytes_of = |id| model.tokenizer.token_bytes(id, true).unwrap_or(&[]);
            let repeated = steering.dry.as_ref().map(|dry| dry.less(&tokens, bytes_of));
            let none = Penalties::NONE;
            let penalties = steering.penalties.as_ref().unwrap_or(&none);
            penalties.changes(&tokens, generated, vocab, &repeated.unwrap_or_default())
        });
        let chain = match (steering.chain, self.answer.mirostat) {
            (chain, Some(_)) => {
                Some(Chain { mirostat: self.answer.mirostat, ..chain.unwrap_or(Chain::NONE) })
            }
            (chain, None) => chain,
        };
        SampleRow {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            seed: sampling.seed,
            // The number of the drawn token, with those that were dropped: no random number comes twice.
            position: self.token_count().wrapping_add(drafted).wrapping_add(self.dropped),
            top_logprobs: sampling.top_logprobs,
            changes: changes.flatten(),
            mask: None,
            chain,
        }
    }

    /// Sampling settings of the next token that its draft model draws: those of the answer's own token at that place.
    pub fn draft_row(&self) -> SampleRow {
        let row = self.sample_row(self.draft.ids().len() as u32);
        let vocab = self.drafter.as_ref().map_or(0, |drafter| drafter.vocab);
        let changes = row.changes.as_ref().map(|changes| {
            changes.iter().copied().filter(|change| change.id < vocab).collect::<Arc<[LogitChange]>>()
        });
        SampleRow { top_logprobs: 0, changes, ..row }
    }

    /// Sampling settings of a row of the prompt whose next token is known: it is drawn, for its log-probability among the unchanged
    /// logits.
    pub fn score_row(&self, row: u32) -> SampleRow {
        let next = row.saturating_add(1);
        let id = self.tokens.get(next as usize).copied().unwrap_or(0);
        let change = LogitChange { id, bias: CERTAIN, repeat: 1.0, less: 0.0 };
        SampleRow {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            position: next.wrapping_add(self.dropped),
            top_logprobs: self.answer.job.scores.unwrap_or(0).max(1),
            changes: Some([change].into()),
            mask: None,
            chain: None,
        }
    }

    /// Adds a step's rows of the last layer to the embedding.
    pub fn embed(&mut self, rows: &[f32]) {
        if let Some(pooled) = &mut self.answer.pooled {
            pooled.add(rows);
        }
    }

    /// The account of a prompt whose rows were all computed, if its embedding is wanted.
    pub fn embedded(&mut self, now: Instant) -> Option<Result<Outcome, BackendError>> {
        let pooled = self.answer.pooled.as_ref().filter(|_| self.pending() == 0)?;
        let embedding = pooled.embedding();
        (self.answer.first_token, self.answer.last_token) = (Some(now), Some(now));
        let outcome = self.outcome(StopReason::MaxTokens);
        Some(
            embedding
                .map(|numbers| Outcome { embedding: Some(numbers), ..outcome })
                .ok_or(BackendError::NotFinite),
        )
    }

    /// The event for the log-probabilities of the prompt's next tokens.
    pub fn told(&self, scores: Vec<Sampled>) -> TokenBatch {
        let most = self.answer.job.scores.unwrap_or(0) as usize;
        let one = |score: Sampled| {
            let mut top = score.top;
            top.truncate(most);
            TokenLogprob { logprob: score.logprob, top }
        };
        TokenBatch { logprobs: scores.into_iter().map(one).collect(), ..TokenBatch::default() }
    }

    /// Makes the event for a token that [`Sequence::advance`] took. Adds the reason if the token ends the answer.
    pub fn accept(&mut self, sampled: Sampled, now: Instant) -> (TokenBatch, Option<StopReason>) {
        let (generated, known) = (self.generated_tokens(), u64::from(self.token_count()));
        let Answer { job, text, first_token, last_token, mirostat, .. } = &mut self.answer;
        first_token.get_or_insert(now);
        *last_token = Some(now);
        if let (Some(aim), Some(cut), Some(surprise)) =
            (job.steering.mirostat, &mut *mirostat, sampled.surprise)
        {
            *cut = aim.next(*cut, surprise);
        }
        let tokenizer = &job.model.tokenizer;
        let ends = !job.ignore_eog && tokenizer.is_end_of_generation(sampled.id);
        // Control tokens that are no marks have no text, and neither has an id without an entry (a padded vocabulary).
        let shown = job.marks.contains(&sampled.id);
        let bytes = tokenizer.token_bytes(sampled.id, shown).unwrap_or(&[]);
        let new_text = if ends { String::new() } else { text.push(bytes) };
        let reason = match () {
            () if ends => Some(StopReason::EndOfGeneration),
            () if text.stopped() => Some(StopReason::StopText),
            // Checked before the full context: an answer with all requested tokens did not run out of room.
            () if generated >= job.max_tokens => Some(StopReason::MaxTokens),
            () if known >= u64::from(job.context_tokens) && job.shift.is_none() => {
                Some(StopReason::ContextFull)
            }
            () => None,
        };
        let logprobs = match job.sampling.top_logprobs {
            0 => Vec::new(),
            _ => vec![TokenLogprob { logprob: sampled.logprob, top: sampled.top }],
        };
        (TokenBatch { ids: vec![sampled.id], text: new_text, logprobs }, reason)
    }

    /// How many first tokens stay, if the context is full and the answer goes on without others.
    pub fn shifts(&self) -> Option<u32> {
        let job = &self.answer.job;
        job.shift.filter(|_| self.token_count() >= job.context_tokens)
    }

    /// The account of the answer, after its end.
    pub fn outcome(&mut self, reason: StopReason) -> Outcome {
        let between = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
            (Some(from), Some(to)) => to.saturating_duration_since(from),
            _ => Duration::ZERO,
        };
        let generated_tokens = self.generated_tokens();
        let admitted = self.first_admitted;
        let Answer { job, text, first_token, last_token, load, lookups, .. } = &mut self.answer;
        Outcome {
            reason,
            text: text.finish(),
            prompt_tokens: self.request.prompt_tokens,
            reused_tokens: self.reused.unwrap_or(0),
            drafted_tokens: self.draft.counts().0,
            accepted_tokens: self.draft.counts().1,
            generated_tokens,
            embedding: None,
            dropped_tokens: self.dropped,
            queue: between(Some(job.arrived), admitted),
            load: *load,
            lookups: *lookups,
            prefill: between(admitted, *first_token).saturating_sub(*load),
            decode: between(*first_token, *last_token),
        }
    }

    /// Sends an event; false when the client has disconnected.
    pub fn send(&self, event: Event) -> bool {
        self.answer.job.events.send(event).is_ok()
    }

    /// True when the client has disconnected and no event reaches it.
    pub fn is_deaf(&self) -> bool {
        self.answer.job.events.is_closed()
    }
}
