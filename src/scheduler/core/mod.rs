//! The engine thread: takes commands, gets the next step from the schedule, runs it and reports.
//!
//! One turn: commands, expiries, admission, at most one step, reports. After a turn without work the thread sleeps
//! until a command or the next expiry, at most one second.
//!
//! A panic inside a step fails that step's sequences and closes the model; the model's other sequences prefill their
//! tokens again. A panic elsewhere or during cleanup fails everything and reopens the device, and so does the loss of
//! the device. The engine continues after each of these. It ends, and reports that, only when no device can be opened.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::device::Device;
use super::drafter::Drafter;
use super::engine::Factory;
use super::facts::{Facts, VALUES_BYTES};
use super::handle::Shared;
use super::masks::MaskPool;
use super::paging::Paging;
use super::rates::Rates;
use super::schedule::{Expiry, Limits, Schedule, StepPlan};
use super::sequence::Sequence;
use super::step::StepArrays;
use super::swap::HostMemory;
use super::{Counters, EngineOptions, Event, Job, JobError};
use crate::backend::Backend;
use crate::model::ModelId;
use crate::{aside, lock};

mod compute;
mod drafting;
mod endings;
mod loads;
pub(super) mod orders;
mod recovery;
mod report;
mod restores;
mod values;

/// Longest time between two heartbeats.
const IDLE_WAKE: Duration = Duration::from_secs(1);
/// Longest age of a published snapshot while steps run. Building one costs some 100 us with a full queue.
const SNAPSHOT_AGE: Duration = Duration::from_millis(50);

enum Turn {
    /// Start the next turn at once.
    Worked,
    /// Sleep until there is work.
    Idle,
    Stop,
    /// The device is lost and no other could be opened.
    Lost,
}

pub(super) struct Core {
    options: EngineOptions,
    shared: Arc<Shared>,
    factory: Factory,
    device: Device,
    schedule: Schedule,
    arrays: StepArrays,
    counters: Counters,
    rates: Rates,
    /// Suspended steps, beside those of the schedule, by model and whether they run beside another.
    paused: BTreeMap<(ModelId, bool), compute::Paused>,
    /// Values of the last step of each model, where they still take memory.
    values: values::Kept,
    /// Pages of weights that steps read in place.
    paging: Paging,
    /// Computes masks of next tokens.
    masks: MaskPool,
    /// The step in progress: its sequences fail if it panics.
    in_step: Option<StepPlan>,
    /// Prefixes to write back, a slice in each turn.
    restores: VecDeque<restores::Restoring>,
    /// Sequences that ended in this turn and their last events. They are sent after a snapshot without these sequences
    /// is published.
    ended: Vec<(Sequence, Event)>,
    /// Executed orders that freed memory, and the requesters who wait for the answer.
    cleared: Vec<(orders::Cleared, oneshot::Sender<orders::Cleared>)>,
    drain: Option<Instant>,
    published: Instant,
    housekept: Instant,
    /// The version of users' shares that the schedule has.
    shares_seen: u64,
    /// No device could be opened.
    lost: bool,
}

impl Core {
    pub fn new(
        options: EngineOptions,
        shared: Arc<Shared>,
        backend: Box<dyn Backend>,
        factory: Factory,
    ) -> Self {
        let schedule = Schedule::new(limits(&options, &shared));
        let paging = Paging::new(options.page_reader.clone(), waker(&shared));
        let masks = MaskPool::new(waker(&shared));
        let (now, keeper) = (lock::now(), options.keeper.clone());
        let host = HostMemory::new(options.swap_bytes);
        let mut core = Self {
            options,
            shared,
            factory,
            device: Device::new(backend, keeper, host),
            schedule,
            arrays: StepArrays::default(),
            counters: Counters::default(),
            rates: Rates::default(),
            paused: BTreeMap::new(),
            values: values::Kept::default(),
            paging,
            masks,
            in_step: None,
            restores: VecDeque::new(),
            ended: Vec::new(),
            cleared: Vec::new(),
            drain: None,
            published: now,
            housekept: now,
            shares_seen: 0,
            lost: false,
        };
        core.publish();
        core
    }

    /// Runs the thread until it ends. If it ends without a request to stop,
    /// [`EngineHandle::failed`](super::EngineHandle::failed) reports that.
    pub fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let stopped = catch_unwind(AssertUnwindSafe(|| {
            let stopped = self.serve();
            self.shared.inbox.lock().stop = true;
            self.take_commands();
            self.fail_loads(None, &|| JobError::Draining);
            self.fail_all(|| JobError::Draining);
            self.send_ended();
            self.keep_all_prefixes();
            stopped
        }));
        shared.inbox.lock().stop = true;
        shared.failed.send_replace(!stopped.unwrap_or(false));
        shared.drained.send_replace(true);
    }

    /// Offers all known prefixes to the keeper before the engine ends.
    fn keep_all_prefixes(&mut self) {
        self.restores.clear();
        let ids: Vec<ModelId> = self.device.models.iter().map(|(id, _)| id).collect();
        for id in ids {
            self.device.keep_prefixes(id, &self.schedule, u64::MAX);
        }
    }

    /// Runs turns until a stop (true), or until no device can be opened (false).
    fn serve(&mut self) -> bool {
        let mut idle = true;
        loop {
            match catch_unwind(AssertUnwindSafe(|| self.turn(idle))) {
                Ok(Turn::Worked) => idle = false,
                Ok(Turn::Idle) => idle = true,
                Ok(Turn::Stop) => return true,
                Ok(Turn::Lost) => return false,
                Err(panic) => {
                    idle = false;
                    let text = aside::panic_text(panic.as_ref());
                    match catch_unwind(AssertUnwindSafe(|| self.recover(text))) {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => {
                            tracing::error!(%error, "the device could not be reopened: the engine ends");
                            return false;
                        }
                        Err(panic) => {
                            let panic = aside::panic_text(panic.as_ref());
                            tracing::error!(
                                panic,
                                "a second panic during cleanup of the first: the engine ends"
                            );
                            return false;
                        }
                    }
                }
            }
        }
    }

    fn turn(&mut self, idle: bool) -> Turn {
        self.shared.heartbeat.fetch_add(1, Ordering::Relaxed);
        if idle {
            self.sleep();
        }
        if self.take_commands() {
            return Turn::Stop;
        }
        if let Some(shares) = self.options.users.shares_since(&mut self.shares_seen) {
            self.schedule.set_shares(shares);
        }
        let now = lock::now();
        self.expire(now);
        self.end_complete();
        let admitted = self.admit(now);
        let ended = !self.ended.is_empty();
        self.report(admitted); // before the step, which may take seconds
        let loaded = self.drive_loads() | self.restore_some() | self.swap_in();
        self.look_at_pages();
        self.look_at_masks(now);
        let step = self.schedule.next_step(now);
        self.counters.sequences_parked += self.schedule.take_preempted();
        if step.as_ref().is_none_or(|step| !step.resumed) {
            self.release_freed(); // a resumed step still writes pages that its sequences have lost
        }
        let worked = admitted || ended || loaded || step.is_some();
        match step {
            Some(mut step) => {
                if self.draft(&mut step) {
                    self.step(step);
                }
            }
            None => self.masks.start(),
        }
        self.housekeep(now);
        self.report(!worked);
        if self.drain.is_some() && self.schedule.is_empty() {
            self.shared.drained.send_replace(true);
        }
        match (self.lost, worked) {
            (true, _) => Turn::Lost,
            (false, true) => Turn::Worked,
            (false, false) => Turn::Idle,
        }
    }

    /// Sends the last events of ended sequences and publishes a snapshot. Without ended sequences it publishes only
    /// when `due` or when the last snapshot is old.
    fn report(&mut self, due: bool) {
        if !self.ended.is_empty() {
            self.send_ended();
        } else if due || lock::now().saturating_duration_since(self.published) >= SNAPSHOT_AGE {
            self.publish();
        }
    }

    /// Waits for a command, the next expiry or the next heartbeat.
    fn sleep(&self) {
        let mut until = lock::now() + IDLE_WAKE;
        // The last turn ended every expired sequence, so an instant in the past cannot make this loop spin.
        let drain = self.drain.filter(|_| !self.schedule.is_empty());
        let admission = self.schedule.next_admission_change(lock::now());
        for moment in [self.schedule.next_expiry(), drain, admission].into_iter().flatten() {
            until = until.min(moment);
        }
        let mut inbox = self.shared.inbox.lock();
        if !inbox.pending() && inbox.drain == self.drain {
            self.shared.wake.wait_until(&mut inbox, until);
        }
    }

    /// Executes the commands of the inbox; true when the engine must stop.
    fn take_commands(&mut self) -> bool {
        let commands = self.shared.inbox.lock().take();
        for job in commands.jobs {
            self.submit(job);
        }
        for request in commands.loads {
            let facts = self.shared.facts();
            self.device.ask(request, |tensor| facts.weight_bytes(tensor));
        }
        for order in commands.orders {
            self.obey(order);
        }
        for (id, items) in commands.credits {
            self.schedule.credit(id, items);
        }
        for id in commands.cancels {
            self.fail(id, JobError::Cancelled);
        }
        for id in commands.gone {
            self.device.models.unloaded(id);
            self.fail_loads(Some(id), &|| JobError::Cancelled);
        }
        self.device.remove_left(&mut self.schedule);
        self.answer_cleared();
        self.paging.keep(|id| self.device.models.get(id).is_some());
        if commands.drain.is_some() && self.drain.is_none() {
            for id in self.schedule.queued() {
                self.fail(id, JobError::Draining);
            }
        }
        self.drain = commands.drain;
        commands.stop
    }

    fn submit(&mut self, job: Job) {
        let (model, facts) = (&job.model, self.shared.facts());
        let program = &model.plan.program;
        let sizes = facts.sizes_of(program);
        self.device.enter(model, lock::now());
        self.device.models.begun(model.id);
        let mut sequence = Sequence::of(job, sizes);
        sequence.drafter = self.drafter_of(&sequence, &facts);
        self.schedule.submit(sequence);
    }

    /// The draft model of a new sequence. Masks are made for the tokens of a draft while a step computes, so an answer of a given form
    /// has none. Nor can a recurrent state take a refused token back.
    fn drafter_of(&mut self, sequence: &Sequence, facts: &Facts) -> Option<Drafter> {
        let Job { model, draft_model, .. } = &sequence.answer.job;
        let wanted = sequence.request.drafts > 0 && sequence.answer.masking.is_none();
        let drafting = draft_model.as_ref().filter(|drafting| wanted && drafting.id != model.id)?;
        let program = &drafting.plan.program;
        if facts.state_bytes(program) > 0 || program.encoder().is_some() {
            return None;
        }
        self.device.enter(drafting, lock::now());
        self.device.models.begun(drafting.id);
        Some(Drafter::of(drafting, facts.page_bytes(program), model.plan.program.vocab()))
    }

    fn expire(&mut self, now: Instant) {
        for (id, expiry) in self.schedule.expired(now) {
            let generated_tokens = self.schedule.get(id).map_or(0, Sequence::generated_tokens);
            self.fail(
                id,
                match expiry {
                    Expiry::Deadline => JobError::DeadlineExceeded { generated_tokens },
                    Expiry::SlowReader { waited } => JobError::SlowReader { waited_s: waited.as_secs() },
                },
            );
        }
        for id in self.schedule.ids(Sequence::is_deaf) {
            self.fail(id, JobError::Cancelled);
        }
        if self.drain.is_some_and(|deadline| deadline <= now) {
            self.fail_all(|| JobError::Draining);
        }
    }

    fn admit(&mut self, now: Instant) -> bool {
        let admission = self.schedule.admit(now);
        self.counters.sequences_parked += admission.parked.len() as u64;
        for parked in admission.parked {
            tracing::debug!(sequence = parked.0, "a sequence gave its place up for another user's");
        }
        self.release_freed();
        if admission.admitted.is_empty() {
            return false;
        }
        for id in &admission.admitted {
            let masking = self.schedule.get(*id).and_then(|sequence| sequence.answer.masking.as_ref());
            if let Some(masking) = masking.filter(|masking| masking.is_new()) {
                self.masks.compute(masking, &[], &[]);
            }
        }
        self.masks.start();
        let mut inbox = self.shared.inbox.lock();
        for id in &admission.admitted {
            // Its place in the queue is another one's now.
            inbox.live.get_mut(id).and_then(Option::take);
        }
        true
    }
}

/// Wakes the engine thread.
fn waker(shared: &Arc<Shared>) -> Arc<dyn Fn() + Send + Sync> {
    let shared = Arc::clone(shared);
    Arc::new(move || {
        shared.inbox.lock().woken = true;
        shared.wake.notify_one();
    })
}

fn limits(options: &EngineOptions, shared: &Shared) -> Limits {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let facts = shared.facts();
    Limits {
        rows_max: count(facts.limits.rows),
        suspends: facts.suspends,
        values_bytes: VALUES_BYTES,
        sequences_max: count(facts.limits.wanted_rows),
        kv_budget_bytes: facts.kv_budget_bytes,
        kv_user_bytes: facts.kv_user_bytes,
        reuse: options.reuse,
        swaps: options.swap_bytes > 0,
        slow_reader: options.slow_reader,
        privileged: options.privileged.clone(),
    }
}
