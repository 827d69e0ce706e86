//! Decides the order in which sequences run. Pure: no I/O, no device, and no clock except the instants that callers
//! pass in.
//!
//! - Admission is first come, first served over all models. An admitted sequence has reserved KV pages for the most
//!   positions it can fill, so it never runs out of pages. It gets page *numbers* as it grows.
//! - Each step belongs to one model; models with runnable sequences take turns.
//! - A step takes one row of every decoding sequence, then fills up to `rows_max` with prompt chunks in order of
//!   admission. At most `rows_max` sequences are admitted, so a prompt always gets at least one row.
//! - A sequence without credit keeps its pages and is skipped.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::pages::PagePool;
use super::sequence::{Answer, Sequence};
use super::{SequenceId, SequenceState};
use crate::model::ModelId;

/// Limits of the schedule.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    /// Most rows of one step; at least 1.
    pub rows_max: u32,
    /// Most sequences admitted at once; 1 to `rows_max`.
    pub sequences_max: u32,
    /// Most bytes of KV cache for all models together.
    pub kv_budget_bytes: u64,
    /// How long an admitted sequence may have no credit.
    pub slow_reader: Duration,
}

/// Rows of one sequence in a step: positions `start..start + rows`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Work {
    pub id: SequenceId,
    pub start: u32,
    pub rows: u32,
    /// The last row is the last known token, and its logits give the next one.
    pub samples: bool,
    /// True for a row that continues an answer, false for rows of a prompt.
    pub decode: bool,
}

/// The next step: rows of sequences of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StepPlan {
    pub model: ModelId,
    pub work: Vec<Work>,
    /// The previous step belonged to another model.
    pub switched: bool,
}

/// Why a sequence has expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expiry {
    Deadline,
    SlowReader { waited: Duration },
}

/// A live sequence and its queue position, for a snapshot.
#[derive(Debug)]
pub(super) struct View<'a, A> {
    pub sequence: &'a Sequence<A>,
    pub state: SequenceState,
    /// From 1; 0 once admitted.
    pub queue_position: u32,
}

/// All live sequences of an engine.
#[derive(Debug)]
pub(super) struct Schedule<A = Answer> {
    limits: Limits,
    /// Waiting sequences in order of arrival. The engine's inbox bounds their number.
    queue: VecDeque<Sequence<A>>,
    /// Admitted sequences in order of admission; at most `limits.sequences_max`.
    running: Vec<Sequence<A>>,
    pools: BTreeMap<ModelId, PagePool>,
    reserved_bytes: u64,
    /// The model that had the last step.
    turn: Option<ModelId>,
    /// Until this instant the same model also gets the next step, if it can run.
    turn_kept: Option<Instant>,
}

impl<A> Schedule<A> {
    /// Clamps `limits` to their ranges.
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
            turn_kept: None,
        }
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Pages of a model's pool: the whole budget, because models share it by bytes. Pages that are never written cost
    /// nothing.
    pub fn pool_pages(&self, page_bytes: u64) -> u32 {
        u32::try_from(self.limits.kv_budget_bytes / page_bytes.max(1)).unwrap_or(u32::MAX)
    }

    /// Appends a sequence to the queue.
    pub fn submit(&mut self, sequence: Sequence<A>) {
        self.queue.push_back(sequence);
    }

    /// Admits sequences from the head of the queue while the limits allow. A head that does not fit blocks those behind
    /// it.
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

    /// Plans the next step and assigns pages to its rows; `None` when no sequence can run.
    pub fn next_step(&mut self, now: Instant) -> Option<StepPlan> {
        let model = self.next_turn(now)?;
        let switched = self.turn.replace(model) != Some(model);
        let mut rows_left = self.limits.rows_max;
        let mut work = Vec::new();
        for decode in [true, false] {
            let runs =
                |s: &&mut Sequence<A>| s.request.model == model && s.is_runnable() && s.decodes() == decode;
            for sequence in self.running.iter_mut().filter(runs) {
                let rows = sequence.pending().min(rows_left);
                if rows == 0 {
                    break;
                }
                rows_left -= rows;
                let samples = rows == sequence.pending();
                work.push(Work { id: sequence.request.id, start: sequence.computed, rows, samples, decode });
                let pool = self.pools.get_mut(&model)?;
                while sequence.needs_page(rows) {
                    sequence.pages.push(pool.take());
                }
            }
        }
        Some(StepPlan { model, work, switched })
    }

    /// Lets the model of the last step keep its turn until this instant, as long as it can run. Its loaded weights are
    /// then used before another model evicts them.
    pub fn keep_turn(&mut self, until: Option<Instant>) {
        self.turn_kept = until;
    }

    /// The next runnable model after that of the last step, in a circle by id.
    fn next_turn(&self, now: Instant) -> Option<ModelId> {
        let runnable = || self.running.iter().filter(|s| s.is_runnable()).map(|s| s.request.model);
        if self.turn_kept.is_some_and(|until| now < until)
            && let Some(same) = runnable().find(|m| self.turn == Some(*m))
        {
            return Some(same);
        }
        let after = runnable().filter(|&m| self.turn.is_some_and(|last| m > last)).min();
        after.or_else(|| runnable().min())
    }

    fn all(&self) -> impl Iterator<Item = &Sequence<A>> {
        self.running.iter().chain(&self.queue)
    }

    /// Looks up a live sequence.
    pub fn get(&self, id: SequenceId) -> Option<&Sequence<A>> {
        self.all().find(|s| s.request.id == id)
    }

    /// As [`Schedule::get`], mutable.
    pub fn get_mut(&mut self, id: SequenceId) -> Option<&mut Sequence<A>> {
        self.running.iter_mut().chain(&mut self.queue).find(|s| s.request.id == id)
    }

    /// Grants a sequence `items` more token events. Ignores unknown sequences.
    pub fn credit(&mut self, id: SequenceId, items: u32) {
        if let Some(sequence) = self.get_mut(id)
            && items > 0
        {
            sequence.credit = sequence.credit.saturating_add(items);
            sequence.stalled = None;
        }
    }

    /// Removes a sequence in any state and frees its pages. The returned sequence still lists them.
    pub fn remove(&mut self, id: SequenceId) -> Option<Sequence<A>> {
        if let Some(at) = self.queue.iter().position(|s| s.request.id == id) {
            return self.queue.remove(at);
        }
        let at = self.running.iter().position(|s| s.request.id == id)?;
        let sequence = self.running.remove(at);
        self.reserved_bytes -= sequence.reserved_bytes();
        if let Some(pool) = self.pools.get_mut(&sequence.request.model) {
            pool.give_back(&sequence.pages);
        }
        Some(sequence)
    }

    /// Removes all sequences, reservations and pools.
    pub fn clear(&mut self) -> Vec<Sequence<A>> {
        self.pools.clear();
        self.reserved_bytes = 0;
        self.running.drain(..).chain(self.queue.drain(..)).collect()
    }

    /// Sequences whose deadline has passed or that had no credit for too long.
    pub fn expired(&self, now: Instant) -> Vec<(SequenceId, Expiry)> {
        let expiry = |s: &Sequence<A>| {
            if s.request.deadline.is_some_and(|deadline| deadline <= now) {
                return Some((s.request.id, Expiry::Deadline));
            }
            let waited = now.saturating_duration_since(s.stalled?);
            (waited >= self.limits.slow_reader).then_some((s.request.id, Expiry::SlowReader { waited }))
        };
        self.all().filter_map(expiry).collect()
    }

    /// The next instant at which [`Schedule::expired`] may return a sequence.
    pub fn next_expiry(&self) -> Option<Instant> {
        let moments = self.all().flat_map(|s| {
            [s.request.deadline, s.stalled.and_then(|t| t.checked_add(self.limits.slow_reader))]
        });
        moments.flatten().min()
    }

    /// Drops the computed positions of a model whose KV pool is gone; its sequences prefill all their tokens again.
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

    /// Pages of a sequence, in order of position.
    pub fn pages(&self, id: SequenceId) -> &[u32] {
        self.get(id).map_or(&[], |s| &s.pages)
    }

    /// Waiting sequences in order of arrival.
    pub fn queued(&self) -> Vec<SequenceId> {
        self.queue.iter().map(|s| s.request.id).collect()
    }

    /// Number of waiting sequences.
    pub fn queued_count(&self) -> usize {
        self.queue.len()
    }

    /// True when no sequence is live.
    pub fn is_empty(&self) -> bool {
        self.running.is_empty() && self.queue.is_empty()
    }

    /// Live sequences for which `wanted` holds, admitted ones first.
    pub fn ids(&self, wanted: impl Fn(&Sequence<A>) -> bool) -> Vec<SequenceId> {
        self.all().filter(|s| wanted(s)).map(|s| s.request.id).collect()
    }

    /// Pages in use and pages in total, over all open pools.
    pub fn page_counts(&self) -> (u64, u64) {
        let pools = self.pools.values();
        pools.fold((0, 0), |(used, size), p| (used + u64::from(p.used()), size + u64::from(p.size())))
    }

    /// KV bytes that admitted sequences have reserved.
    pub fn reserved_bytes(&self) -> u64 {
        self.reserved_bytes
    }

    /// All sequences: admitted in order of admission, then waiting in order of arrival.
    pub fn views(&self) -> impl Iterator<Item = View<'_, A>> {
        let running = self.running.iter().map(|s| View { sequence: s, state: s.state(), queue_position: 0 });
        let queued = self.queue.iter().zip(1..).map(|(sequence, queue_position)| View {
            sequence,
            state: SequenceState::Queued,
            queue_position,
        });
        running.chain(queued)
    }
}

#[cfg(test)]
mod tests;
