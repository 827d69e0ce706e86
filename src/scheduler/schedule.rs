//! Decides the order in which sequences run. Pure: no I/O, no device, and no clock except the instants that callers
//! pass in.
//!
//! - Users share the device: its time (`accounts`), its places and its KV bytes. `admission` says who gets a place and
//!   who gives one up, `compose` which rows a step takes.
//! - A sequence gets KV pages as it grows, some shared with others (`kv` beside this file). When none is left, the
//!   youngest sequence of the user that holds most gives its pages up, and goes on later (`pages`).
//! - Each step belongs to one model. The user with the least device time chooses it: its models take turns.
//! - A sequence without credit is skipped. It keeps its pages until another sequence needs them.
//! - A long step may be suspended between two parts, on the CPU also inside one, so that another step can run. On the CPU that
//!   may be a short step of the same model, beside the suspended one (`beside`). Values of all steps in flight have a bound.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use super::accounts::Accounts;
use super::costs::Cost;
use super::kv::{Kv, Reuse, Sums};
use super::masks::Late;
use super::sequence::{Answer, Request, Sequence};
use super::{SequenceId, SequenceState};
use crate::backend::KV_PAGE_TOKENS;
use crate::model::ModelId;

mod admission;
mod alike;
mod beside;
mod compose;
mod drafters;
mod drafts;
mod pages;

/// Limits of the schedule.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    /// Most rows of one step; at least 1.
    pub rows_max: u32,
    /// Whether a step makes way for another one before it ends.
    pub suspends: bool,
    /// Most bytes that the values of all steps in flight take.
    pub values_bytes: u64,
    /// Most sequences admitted at once; 1 to `rows_max`.
    pub sequences_max: u32,
    /// Most bytes of KV cache for all models together.
    pub kv_budget_bytes: u64,
    /// Most of that that the admitted sequences of one user hold.
    pub kv_user_bytes: u64,
    /// The users whose prefixes a sequence may take.
    pub reuse: Reuse,
    /// Whether pages of parked sequences are copied to host memory before they go.
    pub swaps: bool,
    /// How long an admitted sequence may have no credit.
    pub slow_reader: Duration,
    /// Users whose requests never wait for a place that another user's sequence holds.
    pub privileged: Vec<u32>,
}

/// Rows of one sequence in a step: positions `start..start + rows`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Work {
    pub id: SequenceId,
    /// The user that is charged for the rows.
    pub uid: u32,
    /// The user's connection, charged likewise.
    pub connection: u64,
    /// [`Sequence::restarts`] when the step was planned: a sequence that restarted since then discards the result.
    pub restarts: u32,
    pub start: u32,
    pub rows: u32,
    /// The last row is the last known token, and its logits give the next one.
    pub samples: bool,
    /// So many of the last rows tell the log-probability of their next token, which is known. None samples then.
    pub scores: u32,
    /// So many of the last rows are in the embedding of the prompt.
    pub embeds: u32,
    /// So many of the last rows are drafted tokens, each with logits for the next one.
    pub drafts: u32,
    /// True for rows that continue an answer, false for rows of a prompt.
    pub decode: bool,
}

/// The next step: rows of sequences of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StepPlan {
    pub model: ModelId,
    pub work: Vec<Work>,
    /// The previous step belonged to another model.
    pub switched: bool,
    /// The step was suspended and goes on.
    pub resumed: bool,
    /// The time that it may take for the sake of the answers in it.
    pub goal: Option<Duration>,
    /// It runs while another step of its model is suspended.
    pub beside: bool,
    /// Its time, and that of steps beside it.
    pub turns: Turns,
    /// Host memory that its values take.
    pub bytes: u64,
}

/// Time of a step that was suspended for steps of its own model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Turns {
    /// Time of the step itself.
    own: Duration,
    /// Time of the steps beside it.
    beside: Duration,
}

impl StepPlan {
    /// True if rows of the sequence are in the step.
    fn has(&self, id: SequenceId) -> bool {
        self.work.iter().any(|work| work.id == id)
    }

    /// Number of token rows.
    pub fn rows(&self) -> u32 {
        self.work.iter().map(|work| work.rows).sum()
    }
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
    /// Number of waiting sequences by user and connection. Steps and admissions ask for users; the queue may have
    /// thousands.
    waiting: BTreeMap<u32, BTreeMap<u64, u32>>,
    /// The number of the last admission of each live user.
    admissions: BTreeMap<u32, u64>,
    /// Number of waiting sequences by user and priority.
    priorities: BTreeMap<u32, BTreeMap<u8, u32>>,
    /// Admitted sequences in order of admission; at most `limits.sequences_max`.
    running: Vec<Sequence<A>>,
    kv: Kv,
    /// The model that had the last step.
    turn: Option<ModelId>,
    /// Until this instant the same model also gets the next step, if it can run.
    turn_kept: Option<Instant>,
    accounts: Accounts<u32>,
    /// The same time, where a user is not idle while its sequences wait for places.
    uses: Accounts<u32>,
    /// Device time of each user's connections.
    connections: BTreeMap<u32, Accounts<u64>>,
    /// Measured time of each model's steps.
    costs: BTreeMap<ModelId, Cost>,
    /// The last step that a user led on a model.
    turns: BTreeMap<(u32, ModelId), u64>,
    /// Suspended steps; at most one of a model.
    suspended: BTreeMap<ModelId, StepPlan>,
    /// Suspended steps that began beside those; at most one of a model.
    suspended_beside: BTreeMap<ModelId, StepPlan>,
    /// Models whose suspended steps wait for pages of weights.
    waits: BTreeSet<ModelId>,
    /// Sequences that stay out of the next step, because others would wait for them.
    late: BTreeSet<SequenceId>,
    /// Sequences of the suspended step beside which a step is being planned.
    aside: BTreeSet<SequenceId>,
    /// Until this instant steps are kept short, because sequences of several users were live not long ago.
    contended: Option<Instant>,
    /// How often a sequence gave its pages up because others needed them.
    preempted: u64,
    /// Number of sequences submitted.
    arrivals: u64,
    /// Number of steps planned.
    steps: u64,
}

impl<A> Schedule<A> {
    /// Clamps `limits` to their ranges.
    pub fn new(mut limits: Limits) -> Self {
        limits.rows_max = limits.rows_max.max(1);
        limits.sequences_max = limits.sequences_max.clamp(1, limits.rows_max);
        Self {
            kv: Kv::new(limits.kv_budget_bytes, limits.reuse),
            limits,
            queue: VecDeque::new(),
            waiting: BTreeMap::new(),
            admissions: BTreeMap::new(),
            priorities: BTreeMap::new(),
            running: Vec::new(),
            turn: None,
            turn_kept: None,
            accounts: Accounts::default(),
            uses: Accounts::default(),
            connections: BTreeMap::new(),
            costs: BTreeMap::new(),
            turns: BTreeMap::new(),
            suspended: BTreeMap::new(),
            suspended_beside: BTreeMap::new(),
            waits: BTreeSet::new(),
            late: BTreeSet::new(),
            aside: BTreeSet::new(),
            contended: None,
            preempted: 0,
            arrivals: 0,
            steps: 0,
        }
    }

    /// Replaces the shares of device time of users that have another one than most.
    pub fn set_shares(&mut self, shares: BTreeMap<u32, u32>) {
        self.uses.set_shares(shares.clone());
        self.accounts.set_shares(shares);
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Pages of a model's pool.
    pub fn pool_pages(&self, page_bytes: u64) -> u32 {
        self.kv.pool_pages(page_bytes)
    }

    /// Appends a sequence to the queue.
    pub fn submit(&mut self, mut sequence: Sequence<A>) {
        sequence.arrival = self.arrivals;
        self.arrivals += 1;
        self.enqueue(sequence);
    }

    /// Puts a sequence into the queue, at its place in the order of arrival.
    fn enqueue(&mut self, sequence: Sequence<A>) {
        let of_user = self.waiting.entry(sequence.request.uid).or_default();
        *of_user.entry(sequence.request.connection).or_default() += 1;
        let by_priority = self.priorities.entry(sequence.request.uid).or_default();
        *by_priority.entry(sequence.request.priority).or_default() += 1;
        let before = self.queue.partition_point(|other| other.arrival < sequence.arrival);
        self.queue.insert(before, sequence);
    }

    /// Takes a sequence out of the queue.
    fn dequeue(&mut self, at: usize) -> Option<Sequence<A>> {
        let sequence = self.queue.remove(at)?;
        let Request { uid, connection, priority, .. } = sequence.request;
        if let Some(of_user) = self.priorities.get_mut(&uid) {
            count_down(of_user, priority);
            if of_user.is_empty() {
                self.priorities.remove(&uid);
            }
        }
        if let Some(of_user) = self.waiting.get_mut(&uid) {
            count_down(of_user, connection);
            if of_user.is_empty() {
                self.waiting.remove(&uid);
            }
        }
        Some(sequence)
    }

    /// Users with a live sequence.
    fn users(&self) -> BTreeSet<u32> {
        self.running.iter().map(|s| s.request.uid).chain(self.waiting.keys().copied()).collect()
    }

    /// Lets the model of the last step keep its turn until this instant, as long as it can run. Its loaded weights are
    /// then used before another model evicts them.
    pub fn keep_turn(&mut self, until: Option<Instant>) {
        self.turn_kept = until;
    }

    pub fn all(&self) -> impl Iterator<Item = &Sequence<A>> {
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

    /// Removes a sequence in any state. It leaves its pages to later ones that begin with the same tokens.
    pub fn remove(&mut self, id: SequenceId) -> Option<Sequence<A>> {
        if let Some(at) = self.queue.iter().position(|s| s.request.id == id) {
            return self.dequeue(at);
        }
        let at = self.running.iter().position(|s| s.request.id == id)?;
        self.kv.set_room(None); // its pages may be as many as lacked
        Some(self.take_running(at))
    }

    /// Takes out an admitted sequence, without its pages.
    fn take_running(&mut self, at: usize) -> Sequence<A> {
        self.offer_pages(at, true);
        self.release_drafter(at);
        let mut sequence = self.running.remove(at);
        self.kv.release(sequence.request.model, sequence.request.uid, &mut sequence.kv);
        sequence
    }

    /// Offers an admitted sequence's pages to its user's tree: whole ones, or all.
    fn offer_pages(&mut self, at: usize, all: bool) {
        let Sequence { request, tokens, computed, kv, .. } = &mut self.running[at];
        if request.whole {
            return; // keys and values of an encoder depend on the tokens after
        }
        let computed = tokens.get(..*computed as usize).unwrap_or_default();
        self.kv.keep(request.model, request.uid, computed, all, kv);
    }

    /// Takes the longest known prefix for an admitted sequence of which no row was computed since its admission.
    fn attach(&mut self, at: usize) {
        let sequence = &mut self.running[at];
        let Request { model, uid, .. } = sequence.request;
        let state = self.kv.state_of_tree(model, uid);
        if !sequence.fresh || sequence.looked == Some(state) {
            return;
        }
        // The last known token is computed in any case: its logits give the next one.
        let known = sequence.reusable().to_vec();
        sequence.computed = self.kv.attach(model, uid, &known, &mut sequence.kv);
        sequence.looked = Some(state);
    }

    /// Records that a step computed rows of a sequence, without those of its draft, and the token sampled from the last of these.
    /// `None` if the sequence has ended, or lost its pages, since the step was planned.
    pub fn advance(&mut self, work: &Work, drawn: Option<u32>, now: Instant) -> Option<&mut Sequence<A>> {
        let live = |s: &Sequence<A>| s.request.id == work.id && s.restarts == work.restarts;
        let at = self.running.iter().position(live)?;
        self.running[at].advance(work.rows - work.drafts, drawn, now);
        if work.scores > 0 {
            self.running[at].tell_scores(work.start.saturating_add(work.rows), now);
        }
        if work.embeds > 0 {
            self.running[at].embedded = work.start.saturating_add(work.rows);
        }
        let Sequence { request: Request { model, uid, .. }, kv, .. } = &mut self.running[at];
        self.kv.advance_state(*model, *uid, kv);
        if !work.decode {
            // The state after a whole prompt is of no use: a prompt that goes on from there ends in another way.
            let all = work.samples && !self.running[at].is_recurrent();
            self.offer_pages(at, all);
        }
        self.running.get_mut(at)
    }

    /// Drops the oldest half of an admitted sequence's tokens after the first `kept` ones. Keys and values of the others depend
    /// on those before, so it prefills them again. Its pages are left to later sequences.
    pub fn shift(&mut self, id: SequenceId, kept: u32) {
        let Some(at) = self.running.iter().position(|s| s.request.id == id) else { return };
        self.offer_pages(at, true);
        self.release_drafter(at);
        let sequence = &mut self.running[at];
        self.kv.release(sequence.request.model, sequence.request.uid, &mut sequence.kv);
        sequence.drop_oldest(kept);
        self.attach(at);
    }

    /// The page to copy, and to which, before rows of a sequence are computed.
    pub fn copy_of(&self, id: SequenceId) -> Option<(u32, u32)> {
        let sequence = self.get(id)?;
        let to = sequence.kv.pages.get(sequence.computed as usize / KV_PAGE_TOKENS)?;
        Some((sequence.kv.copied?, *to))
    }

    /// A sequence's page was copied.
    pub fn copied(&mut self, id: SequenceId) {
        if let Some(sequence) = self.running.iter_mut().find(|s| s.request.id == id) {
            self.kv.copied(sequence.request.model, sequence.request.uid, &mut sequence.kv);
        }
    }

    /// The ledger of pages.
    pub fn kv(&self) -> &Kv {
        &self.kv
    }

    /// As [`Schedule::kv`], to change it.
    pub fn kv_mut(&mut self) -> &mut Kv {
        &mut self.kv
    }

    /// Drops the cached pages of a model, or of all. True if any went.
    pub fn drop_cached(&mut self, of: Option<ModelId>) -> bool {
        self.kv.drop_cached(of)
    }

    /// Drops the cached pages that are to go first, until they have so many bytes. Returns how many they have. Pages of models
    /// with a suspended step stay: their memory would come back only after that step.
    pub fn drop_first_cached(&mut self, bytes: u64) -> u64 {
        let suspended = self.suspended_models();
        self.kv.drop_first(bytes, &|model| !suspended.contains(&model))
    }

    /// Takes the pages whose memory the device must give back now. Suspended steps may still write freed pages of their
    /// model.
    pub fn take_freed(&mut self) -> Vec<(ModelId, Vec<u32>)> {
        let suspended = self.suspended_models();
        self.kv.take_freed(|model| !suspended.contains(&model))
    }

    /// As [`Schedule::take_freed`], of recurrent states.
    pub fn take_freed_states(&mut self) -> Vec<(ModelId, Vec<u32>)> {
        let suspended = self.suspended_models();
        self.kv.take_freed_states(|model| !suspended.contains(&model))
    }

    /// Replaces the models whose suspended steps cannot go on yet.
    pub fn set_waiting(&mut self, models: BTreeSet<ModelId>) {
        self.waits = models;
    }

    /// Replaces the sequences that should stay out of the next step. Those late beside others do while one of another user can run.
    pub fn set_late(&mut self, Late { mut beside_others, missed }: Late) {
        self.late = missed;
        if !beside_others.is_empty() {
            let others =
                self.running.iter().filter(|s| self.can_run(s) && !beside_others.contains(&s.request.id));
            let others: BTreeSet<u32> = others.map(|s| s.request.uid).collect();
            let waits = |uid: u32| others.iter().any(|other| *other != uid);
            beside_others.retain(|id| self.get(*id).is_some_and(|s| waits(s.request.uid)));
            self.late.append(&mut beside_others);
        }
    }

    /// True if the next step may take rows of this admitted sequence, once the pages of its model's weights are there.
    fn takes_part(&self, sequence: &Sequence<A>) -> bool {
        sequence.is_runnable() && !self.late.contains(&sequence.request.id)
    }

    /// True if a step could take rows of this admitted sequence now.
    fn can_run(&self, sequence: &Sequence<A>) -> bool {
        let model = sequence.request.model;
        let room = self.is_suspended(model) || self.has_room(sequence, 0);
        self.takes_part(sequence) && !self.waits.contains(&model) && room
    }

    /// Sequences that wait for a place, in order of arrival.
    pub fn waiting_sequences(&self) -> impl Iterator<Item = &Sequence<A>> {
        self.queue.iter()
    }

    /// Admitted sequences with pages in host memory, except those of models with a suspended step.
    pub fn swapped_sequences(&self) -> Vec<SequenceId> {
        let returns = |s: &&Sequence<A>| !s.swapped.is_empty() && !self.is_suspended(s.request.model);
        self.running.iter().filter(returns).map(|s| s.request.id).collect()
    }

    /// True if a live sequence uses the model.
    pub fn has_model(&self, model: ModelId) -> bool {
        self.all().any(|sequence| sequence.uses(model))
    }

    /// Removes all sequences and pools.
    pub fn clear(&mut self) -> Vec<Sequence<A>> {
        self.kv = Kv::new(self.limits.kv_budget_bytes, self.limits.reuse);
        self.suspended.clear();
        self.suspended_beside.clear();
        self.waiting.clear();
        self.priorities.clear();
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
        self.suspended.remove(&model);
        self.suspended_beside.remove(&model);
        for sequence in &mut self.running {
            if sequence.request.model == model {
                sequence.restart();
            }
            if let Some(drafter) = sequence.drafter.as_mut().filter(|drafter| drafter.model == model) {
                drafter.forget();
            }
        }
        self.kv.reset(model);
    }

    /// Drops the pool of a model that no admitted sequence uses.
    pub fn close_pool(&mut self, model: ModelId) {
        if !self.running.iter().any(|s| s.uses(model)) {
            self.kv.close(model);
            self.costs.remove(&model);
        }
    }

    /// Pages of a sequence, in order of position.
    pub fn pages(&self, id: SequenceId) -> &[u32] {
        self.get(id).map_or(&[], |s| &s.kv.pages)
    }

    /// Waiting sequences in order of arrival.
    pub fn queued(&self) -> Vec<SequenceId> {
        self.queue.iter().map(|s| s.request.id).collect()
    }

    /// True when no sequence is live.
    pub fn is_empty(&self) -> bool {
        self.running.is_empty() && self.queue.is_empty()
    }

    /// Live sequences for which `wanted` holds, admitted ones first.
    pub fn ids(&self, wanted: impl Fn(&Sequence<A>) -> bool) -> Vec<SequenceId> {
        self.all().filter(|s| wanted(s)).map(|s| s.request.id).collect()
    }

    /// Pages of all open pools.
    pub fn page_sums(&self) -> Sums {
        self.kv.sums()
    }

    /// Number of cached pages evicted for others since the last call.
    pub fn take_evicted_pages(&mut self) -> u64 {
        self.kv.take_evicted()
    }

    /// Bytes of a model's cached pages.
    pub fn cached_bytes(&self, model: ModelId) -> u64 {
        self.kv.cached_bytes(model)
    }

    /// KV bytes that admitted sequences have, pages shared by several counted once, and those that they are to have soon.
    pub fn claimed_bytes(&self) -> u64 {
        self.running.iter().map(Sequence::outstanding_bytes).fold(self.kv.held_bytes(), u64::saturating_add)
    }

    /// How often a sequence gave its pages up because others needed them, since the last call.
    pub fn take_preempted(&mut self) -> u64 {
        std::mem::take(&mut self.preempted)
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

fn count_down<K: Ord>(counts: &mut BTreeMap<K, u32>, of: K) {
    if let Some(count) = counts.get_mut(&of) {
        *count = count.saturating_sub(1);
        if *count == 0 {
            counts.remove(&of);
        }
    }
}

#[cfg(test)]
mod tests;
