//! Who runs next. Pure: values in, values out; no I/O, no device, no clock but the instants that are given.
//!
//! - Admission is first come, first served over all models. An admitted sequence has reserved the KV pages of all
//!   positions it can come to fill, so it never fails for room half-way; page *numbers* are handed out as it grows.
//! - Each step belongs to one model; models with runnable sequences take turns.
//! - A step takes one row of every sequence that decodes, then fills up to `rows_max` with prompt chunks in order of
//!   admission. At most `rows_max` sequences are admitted, so a prompt always gets at least one row.
//! - A sequence without credit keeps its pages and is passed over.
//!
//! A sequence's computed positions `0..computed` lie in the KV cache. `tokens` are known (prompt and drawn ones);
//! when a step computes the last known one, its logits give the next token.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::pages::PagePool;
use super::{SequenceId, SequenceState, sequence_pages};
use crate::backend::KV_PAGE_TOKENS;
use crate::model::ModelId;

/// Bounds that the policy keeps.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    /// Most rows of one step; at least 1.
    pub rows_max: u32,
    /// Most sequences admitted at once; 1 to `rows_max`.
    pub sequences_max: u32,
    /// KV cache of all models together.
    pub kv_budget_bytes: u64,
    /// How long an admitted sequence may have no credit.
    pub slow_reader: Duration,
}

/// A sequence as the policy sees it when it arrives.
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

/// Rows of one sequence in a step: positions `start..start + rows`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Work {
    pub id: SequenceId,
    pub start: u32,
    pub rows: u32,
    /// The last row is the last known token: its logits give the next one.
    pub samples: bool,
    /// Continues an answer; else takes in a prompt.
    pub decode: bool,
}

/// What to run next: rows of sequences of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StepPlan {
    pub model: ModelId,
    pub work: Vec<Work>,
}

/// Why a sequence's time is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expiry {
    Deadline,
    SlowReader { waited: Duration },
}

/// What a removed sequence leaves behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Removed {
    pub model: ModelId,
    /// Its KV pages, free again.
    pub pages: Vec<u32>,
}

/// A sequence's numbers for [`SequenceSnapshot`](super::SequenceSnapshot).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct View {
    pub id: SequenceId,
    pub model: ModelId,
    pub state: SequenceState,
    pub computed: u32,
    pub kv_pages: u32,
    pub queue_position: u32,
}

#[derive(Debug)]
struct Sequence {
    request: Request,
    /// Known tokens.
    tokens: u32,
    /// Tokens in the KV cache.
    computed: u32,
    pages: Vec<u32>,
    credit: u32,
    /// Since when an admitted sequence has had no credit.
    stalled: Option<Instant>,
}

impl Sequence {
    fn reserved_bytes(&self) -> u64 {
        u64::from(sequence_pages(self.request.positions)).saturating_mul(self.request.page_bytes)
    }

    fn pending(&self) -> u32 {
        self.tokens - self.computed
    }

    fn decodes(&self) -> bool {
        self.tokens > self.request.prompt_tokens && self.pending() == 1
    }

    fn runnable(&self) -> bool {
        self.credit > 0
    }
}

/// The scheduler's state.
#[derive(Debug)]
pub(super) struct Policy {
    limits: Limits,
    /// Waiting, in order of arrival. Bounded by the engine's inbox.
    queue: VecDeque<Sequence>,
    /// Admitted, in order of admission; at most `limits.sequences_max`.
    running: Vec<Sequence>,
    pools: BTreeMap<ModelId, PagePool>,
    reserved_bytes: u64,
    /// The model that had the last step.
    turn: Option<ModelId>,
    /// It has the next one too, if it can run.
    keeps_turn: bool,
}

impl Policy {
    /// `limits` are brought into their ranges.
    pub fn new(mut limits: Limits) -> Self {
        limits.rows_max = limits.rows_max.max(1);
        limits.sequences_max = limits.sequences_max.clamp(1, limits.rows_max);
        Self {
            limits,
            queue: VecDeque::new(),
            running: Vec::new(),
            pools: BTreeMap::new(),
            reserved_bytes: 0,
            turn: None,
            keeps_turn: false,
        }
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Pages of a model's pool: the whole budget, since the budget is shared by bytes. Pages never written cost
    /// nothing.
    pub fn pool_pages(&self, page_bytes: u64) -> u32 {
        u32::try_from(self.limits.kv_budget_bytes / page_bytes.max(1)).unwrap_or(u32::MAX)
    }

    /// Appends a request to the queue.
    pub fn submit(&mut self, request: Request) {
        let (tokens, credit) = (request.prompt_tokens, request.credit);
        self.queue.push_back(Sequence {
            request,
            tokens,
            computed: 0,
            pages: Vec::new(),
            credit,
            stalled: None,
        });
    }

    /// Admits from the head of the queue while sequences and KV budget allow; never past a head that does not fit.
    pub fn admit(&mut self, now: Instant) -> Vec<SequenceId> {
        let mut admitted = Vec::new();
        while self.running.len() < self.limits.sequences_max as usize {
            let Some(head) = self.queue.front() else { break };
            let reserved = self.reserved_bytes.saturating_add(head.reserved_bytes());
            if reserved > self.limits.kv_budget_bytes {
                break;
            }
            let Some(mut head) = self.queue.pop_front() else { break };
            self.reserved_bytes = reserved;
            let pages = self.pool_pages(head.request.page_bytes);
            self.pools.entry(head.request.model).or_insert_with(|| PagePool::new(pages));
            head.stalled = (head.credit == 0).then_some(now);
            admitted.push(head.request.id);
            self.running.push(head);
        }
        admitted
    }

    /// The rows of the next step, with pages handed out for them; `None` when nobody can run.
    pub fn next_step(&mut self) -> Option<StepPlan> {
        let model = self.next_turn()?;
        self.turn = Some(model);
        let mut rows_left = self.limits.rows_max;
        let mut work = Vec::new();
        for decode in [true, false] {
            let members = self
                .running
                .iter_mut()
                .filter(|s| s.request.model == model && s.runnable() && s.decodes() == decode);
            for sequence in members {
                let rows = sequence.pending().min(rows_left);
                if rows == 0 {
                    break;
                }
                rows_left -= rows;
                work.push(Work {
                    id: sequence.request.id,
                    start: sequence.computed,
                    rows,
                    samples: rows == sequence.pending(),
                    decode,
                });
                let pool = self.pools.get_mut(&model)?;
                while sequence.pages.len() * KV_PAGE_TOKENS < (sequence.computed + rows) as usize {
                    sequence.pages.push(pool.take());
                }
            }
        }
        Some(StepPlan { model, work })
    }

    /// Whether the model that had the last step keeps its turn as long as it can run: what was brought to a device for it is
    /// used before it makes room for another.
    pub fn keep_turn(&mut self, keeps: bool) {
        self.keeps_turn = keeps;
    }

    /// The runnable model after the one that had the last step, in a circle by number.
    fn next_turn(&self) -> Option<ModelId> {
        let runnable = || self.running.iter().filter(|s| s.runnable()).map(|s| s.request.model);
        if self.keeps_turn
            && let Some(same) = runnable().find(|m| self.turn == Some(*m))
        {
            return Some(same);
        }
        let after = runnable().filter(|&m| self.turn.is_some_and(|last| m > last)).min();
        after.or_else(|| runnable().min())
    }

    /// Takes note that a step was computed. Each sequence that sampled has one more token and one credit less.
    pub fn complete(&mut self, step: &StepPlan, now: Instant) {
        for work in &step.work {
            let Some(sequence) = self.running.iter_mut().find(|s| s.request.id == work.id) else { continue };
            sequence.computed += work.rows;
            if work.samples {
                sequence.tokens += 1;
                sequence.credit -= 1;
                sequence.stalled = (sequence.credit == 0).then_some(now);
            }
        }
    }

    /// Allows a sequence `items` more results. Unknown ones are ignored.
    pub fn credit(&mut self, id: SequenceId, items: u32) {
        let mut all = self.running.iter_mut().chain(&mut self.queue);
        if let Some(sequence) = all.find(|s| s.request.id == id)
            && items > 0
        {
            sequence.credit = sequence.credit.saturating_add(items);
            sequence.stalled = None;
        }
    }

    /// Takes a sequence out, whatever its state. Its pages are free again at once.
    pub fn remove(&mut self, id: SequenceId) -> Option<Removed> {
        if let Some(at) = self.queue.iter().position(|s| s.request.id == id) {
            let sequence = self.queue.remove(at)?;
            return Some(Removed { model: sequence.request.model, pages: Vec::new() });
        }
        let at = self.running.iter().position(|s| s.request.id == id)?;
        let sequence = self.running.remove(at);
        self.reserved_bytes -= sequence.reserved_bytes();
        if let Some(pool) = self.pools.get_mut(&sequence.request.model) {
            pool.give_back(&sequence.pages);
        }
        Some(Removed { model: sequence.request.model, pages: sequence.pages })
    }

    /// Sequences whose deadline has passed or that had no credit for too long.
    pub fn expired(&self, now: Instant) -> Vec<(SequenceId, Expiry)> {
        let expiry = |s: &Sequence| {
            if s.request.deadline.is_some_and(|deadline| deadline <= now) {
                return Some((s.request.id, Expiry::Deadline));
            }
            let waited = now.saturating_duration_since(s.stalled?);
            (waited >= self.limits.slow_reader).then_some((s.request.id, Expiry::SlowReader { waited }))
        };
        self.running.iter().chain(&self.queue).filter_map(expiry).collect()
    }

    /// When [`Policy::expired`] next has something to say, if nothing else happens.
    pub fn next_expiry(&self) -> Option<Instant> {
        let sequences = self.running.iter().chain(&self.queue);
        let moments = sequences.flat_map(|s| {
            [s.request.deadline, s.stalled.and_then(|t| t.checked_add(self.limits.slow_reader))]
        });
        moments.flatten().min()
    }

    /// Forgets what was computed for a model, whose KV pool is gone: its sequences take in their tokens anew.
    pub fn rewind(&mut self, model: ModelId) {
        for sequence in self.running.iter_mut().filter(|s| s.request.model == model) {
            sequence.computed = 0;
            sequence.pages.clear();
        }
        if let Some(pool) = self.pools.get_mut(&model) {
            *pool = PagePool::new(pool.size());
        }
    }

    /// Drops the pool of a model that has no admitted sequence.
    pub fn close_pool(&mut self, model: ModelId) {
        if !self.running.iter().any(|s| s.request.model == model) {
            self.pools.remove(&model);
        }
    }

    /// Pages of an admitted sequence, in order of position.
    pub fn pages(&self, id: SequenceId) -> &[u32] {
        self.running.iter().find(|s| s.request.id == id).map_or(&[], |s| &s.pages)
    }

    /// Waiting sequences in order of arrival.
    pub fn queued(&self) -> Vec<SequenceId> {
        self.queue.iter().map(|s| s.request.id).collect()
    }

    /// How many wait.
    pub fn queued_count(&self) -> usize {
        self.queue.len()
    }

    /// All sequences of a model, admitted ones first.
    pub fn sequences_of(&self, model: ModelId) -> Vec<SequenceId> {
        let all = self.running.iter().chain(&self.queue);
        all.filter(|s| s.request.model == model).map(|s| s.request.id).collect()
    }

    /// Pages in use and pages there are, over all open pools.
    pub fn page_counts(&self) -> (u64, u64) {
        let pools = self.pools.values();
        pools.fold((0, 0), |(used, size), p| (used + u64::from(p.used()), size + u64::from(p.size())))
    }

    /// KV bytes that admitted sequences have reserved.
    pub fn reserved_bytes(&self) -> u64 {
        self.reserved_bytes
    }

    /// All sequences: admitted in order of admission, then waiting in order of arrival.
    pub fn views(&self) -> impl Iterator<Item = View> {
        let view = |s: &Sequence, state, queue_position| View {
            id: s.request.id,
            model: s.request.model,
            state,
            computed: s.computed,
            kv_pages: s.pages.len() as u32,
            queue_position,
        };
        let running = self.running.iter().map(move |s| {
            let state = match s {
                _ if !s.runnable() => SequenceState::Stalled,
                _ if s.decodes() => SequenceState::Decode,
                _ => SequenceState::Prefill,
            };
            view(s, state, 0)
        });
        let queued = self.queue.iter().zip(1..).map(move |(s, place)| view(s, SequenceState::Queued, place));
        running.chain(queued)
    }
}

#[cfg(test)]
mod tests;
