//! The engine thread: takes commands, asks the policy who runs, runs the step, reports.
//!
//! One turn: commands, expiries, admission, at most one step, reports. When a turn did nothing the thread sleeps until
//! a command or the next expiry, a second at most. A panic inside a step fails that step's sequences and takes the
//! model's room down; its other sequences take their tokens in anew. A panic elsewhere, or in the cleaning up, fails
//! everything and opens the device anew, and so does the loss of the device. Either way the engine serves on; it ends,
//! and says so, only when there is no device to be opened.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use loads::LoadTask;

use super::engine::Factory;
use super::handle::Shared;
use super::policy::{Expiry, Limits, Policy, Request, StepPlan};
use super::residency::Residency;
use super::sequence::Sequence;
use super::step::{self, StepArrays, StepDevice};
use super::{Counters, EngineOptions, Event, Job, JobError, SequenceId};
use crate::backend::{Backend, BackendError, DeviceMemory, ModelSlot, Sampled};
use crate::lock;
use crate::model::{Model, ModelId};
use crate::tensor::MapError;

/// The heartbeat moves at least this often.
const IDLE_WAKE: Duration = Duration::from_secs(1);
/// How old a published snapshot may be while steps run: building one costs some 100 us with a full queue.
const SNAPSHOT_AGE: Duration = Duration::from_millis(50);

/// A model whose first step of a turn brought weights keeps the turn for so many times as long as that step took: when models
/// that share the room of one take turns, a fifth of the time goes to bringing weights.
const TURN_KEPT: u32 = 4;
/// And no longer than this: others wait.
const TURN_KEPT_MAX: Duration = Duration::from_secs(2);

pub(super) mod loads;
pub(super) mod orders;
mod recovery;
mod report;

/// A model that has, or lately had, sequences.
struct Room {
    model: Arc<Model>,
    slot: Option<ModelSlot>,
    /// When its last sequence ended; `None` while it has any.
    idle_since: Option<Instant>,
    /// Unloaded: goes with its last sequence.
    gone: bool,
}

/// Who holds a model that nobody else does: its room and its place.
const HOLDERS: usize = 2;

/// What came of drawing a sequence's token.
type Drawn = Result<Sampled, BackendError>;

impl Room {
    fn new(model: &Arc<Model>) -> Self {
        Self { model: Arc::clone(model), slot: None, idle_since: None, gone: false }
    }
}

enum Turn {
    /// Go on at once.
    Worked,
    /// Nothing to do but wait.
    Idle,
    Stop,
    /// The device is gone and there is no other.
    Lost,
}

pub(super) struct Core {
    options: EngineOptions,
    shared: Arc<Shared>,
    factory: Factory,
    backend: Box<dyn Backend>,
    residency: Residency,
    policy: Policy,
    sequences: HashMap<SequenceId, Sequence>,
    rooms: BTreeMap<ModelId, Room>,
    arrays: StepArrays,
    counters: Counters,
    /// The step under way: who has to answer for a panic.
    in_step: Option<StepPlan>,
    /// Sequences that ended in this turn and their last events, sent when the snapshot shows that they are gone.
    ended: Vec<(Sequence, Event)>,
    drain: Option<Instant>,
    published: Instant,
    housekept: Instant,
    /// There is no device to go on with.
    lost: bool,
    /// The model that had the last step, and until when it keeps its turn.
    turn: Option<ModelId>,
    turn_kept: Option<Instant>,
    /// Loads that were asked for without a step.
    loads: Vec<LoadTask>,
    /// What was on the way when such a request ended: a load among them that fails is cleared away later.
    strays: Vec<Weak<dyn DeviceMemory>>,
}

impl Core {
    pub fn new(
        options: EngineOptions,
        shared: Arc<Shared>,
        backend: Box<dyn Backend>,
        factory: Factory,
    ) -> Self {
        let policy = Policy::new(limits(&options, &shared));
        let now = lock::now();
        let mut core = Self {
            options,
            shared,
            factory,
            backend,
            residency: Residency::default(),
            policy,
            sequences: HashMap::new(),
            rooms: BTreeMap::new(),
            arrays: StepArrays::default(),
            counters: Counters::default(),
            in_step: None,
            ended: Vec::new(),
            drain: None,
            published: now,
            housekept: now,
            lost: false,
            turn: None,
            turn_kept: None,
            loads: Vec::new(),
            strays: Vec::new(),
        };
        core.publish();
        core
    }

    /// The thread's whole life. When it ends other than by being stopped, that is told as
    /// [`EngineHandle::failed`](super::EngineHandle::failed).
    pub fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let stopped = catch_unwind(AssertUnwindSafe(|| {
            let stopped = self.serve();
            self.shared.inbox.lock().stop = true;
            self.take_commands();
            self.fail_loads(None, &|| JobError::Draining);
            self.fail_all(|| JobError::Draining);
            self.settle();
            stopped
        }));
        shared.inbox.lock().stop = true;
        shared.failed.send_replace(!stopped.unwrap_or(false));
        shared.drained.send_replace(true);
    }

    /// Turns until it is stopped (true), or until there is no device to go on with.
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
                    let text = recovery::panic_text(panic.as_ref());
                    match catch_unwind(AssertUnwindSafe(|| self.recover(text))) {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => {
                            tracing::error!(%error, "the device could not be opened anew: the engine ends");
                            return false;
                        }
                        Err(panic) => {
                            let panic = recovery::panic_text(panic.as_ref());
                            tracing::error!(
                                panic,
                                "a second panic while the first was cleaned up: the engine ends"
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
        let now = lock::now();
        self.expire(now);
        let admitted = self.admit(now);
        let ended = !self.ended.is_empty();
        self.report(admitted); // before the step, which may take seconds
        let loaded = self.drive_loads();
        self.policy.keep_turn(self.turn_kept.is_some_and(|until| now < until));
        let step = self.policy.next_step();
        let worked = admitted || ended || loaded || step.is_some();
        if let Some(step) = step {
            self.step(step);
        }
        self.housekeep(now);
        self.report(!worked);
        if self.drain.is_some() && self.sequences.is_empty() {
            self.shared.drained.send_replace(true);
        }
        match (self.lost, worked) {
            (true, _) => Turn::Lost,
            (false, true) => Turn::Worked,
            (false, false) => Turn::Idle,
        }
    }

    /// Sends last events, and publishes a snapshot when there are any, when it is due or the last one is old.
    fn report(&mut self, due: bool) {
        if !self.ended.is_empty() {
            self.settle();
        } else if due || lock::now().saturating_duration_since(self.published) >= SNAPSHOT_AGE {
            self.publish();
        }
    }

    /// Waits for a command, the next expiry or the next heartbeat.
    fn sleep(&self) {
        let mut until = lock::now() + IDLE_WAKE;
        // What has expired ended its sequences in the last turn: a moment that has passed cannot make this spin.
        let drain = self.drain.filter(|_| !self.sequences.is_empty());
        for moment in [self.policy.next_expiry(), drain].into_iter().flatten() {
            until = until.min(moment);
        }
        let mut inbox = self.shared.inbox.lock();
        if !inbox.pending() && inbox.drain == self.drain {
            self.shared.wake.wait_until(&mut inbox, until);
        }
    }

    /// Does what the inbox says; true when it says stop.
    fn take_commands(&mut self) -> bool {
        let commands = self.shared.inbox.lock().take();
        for job in commands.jobs {
            self.submit(job);
        }
        for request in commands.loads {
            self.begin_load(request);
        }
        for order in commands.orders {
            self.obey(order);
        }
        for (id, items) in commands.credits {
            self.policy.credit(id, items);
        }
        for id in commands.cancels {
            self.fail(id, JobError::Cancelled);
        }
        for id in commands.gone {
            if let Some(room) = self.rooms.get_mut(&id) {
                room.gone = true;
            }
            self.fail_loads(Some(id), &|| JobError::Cancelled);
            self.close_if_gone(id);
        }
        if commands.drain.is_some() && self.drain.is_none() {
            for id in self.policy.queued() {
                self.fail(id, JobError::Draining);
            }
        }
        self.drain = commands.drain;
        commands.stop
    }

    fn submit(&mut self, job: Job) {
        let model = &job.model;
        self.policy.submit(Request {
            id: job.id,
            model: model.id,
            page_bytes: self.shared.facts().page_bytes(&model.plan.program),
            prompt_tokens: job.prompt.len() as u32, // `Job::check`: at most `context_tokens`
            positions: job.positions(),
            credit: job.credit,
            deadline: job.deadline,
        });
        self.residency.enter(model);
        let room = self.rooms.entry(model.id).or_insert_with(|| Room::new(model));
        room.idle_since = None;
        self.sequences.insert(job.id, Sequence::new(job));
    }

    fn expire(&mut self, now: Instant) {
        for (id, expiry) in self.policy.expired(now) {
            let generated_tokens = self.sequences.get(&id).map_or(0, Sequence::generated_tokens);
            self.fail(
                id,
                match expiry {
                    Expiry::Deadline => JobError::DeadlineExceeded { generated_tokens },
                    Expiry::SlowReader { waited } => JobError::SlowReader { waited_s: waited.as_secs() },
                },
            );
        }
        let deaf = self.sequences.values().filter(|s| s.job.events.is_closed());
        for id in deaf.map(|s| s.job.id).collect::<Vec<_>>() {
            self.fail(id, JobError::Cancelled);
        }
        if self.drain.is_some_and(|deadline| deadline <= now) {
            self.fail_all(|| JobError::Draining);
        }
    }

    fn admit(&mut self, now: Instant) -> bool {
        let admitted = self.policy.admit(now);
        for id in &admitted {
            if let Some(sequence) = self.sequences.get_mut(id) {
                sequence.admit(now);
            }
        }
        !admitted.is_empty()
    }

    /// Runs a step and hands out what came of it.
    fn step(&mut self, step: StepPlan) {
        let Some(room) = self.rooms.get(&step.model) else { return };
        let model = Arc::clone(&room.model);
        if let Err(error) = model.files.check_unchanged() {
            return self.fail_model(step.model, error);
        }
        let (begun, loads) = (lock::now(), self.residency.counters().loads);
        let (id, switched) = (step.model, self.turn != Some(step.model));
        self.in_step = Some(step);
        let result = self.compute();
        if switched {
            // Others that need the same room wait until what was brought was worth it.
            let brought = self.residency.counters().loads > loads && self.backend.parts_ahead() > 0;
            let now = lock::now();
            self.turn_kept = brought.then(|| now + (TURN_KEPT * (now - begun)).min(TURN_KEPT_MAX));
            self.turn = Some(id);
        }
        let Some(step) = self.in_step.take() else { return };
        if let Err(error) = model.files.check_poison().and_then(|()| model.files.check_unchanged()) {
            return self.fail_model(step.model, error); // what the step read may have been anything: no token of it counts
        }
        match result {
            Ok((sampled, load)) => self.deliver(&step, sampled, load),
            Err(BackendError::GivenUp) => {} // the next turn hears from the inbox why
            // Tried again in the next turn, as often as there is something to let go of.
            Err(error) if error.is_out_of_memory() => self.out_of_memory(&step, &error),
            Err(error @ BackendError::DeviceLost { .. }) => self.replace_device(&error),
            Err(error) => {
                tracing::warn!(model = step.model.0, %error, "a step failed");
                for work in &step.work {
                    self.fail(work.id, JobError::Backend(error.clone()));
                }
            }
        }
    }

    /// Computes `in_step`. The time is what it waited for weights.
    fn compute(&mut self) -> Result<(Vec<Drawn>, Duration), BackendError> {
        let nothing = Ok((Vec::new(), Duration::ZERO));
        let Some(step) = &self.in_step else { return nothing };
        let Some(room) = self.rooms.get_mut(&step.model) else { return nothing };
        self.residency.used(step.model);
        let slot = match room.slot {
            Some(slot) => slot,
            None => {
                let slot = open(self.backend.as_mut(), &self.policy, &self.shared, &room.model)?;
                *room.slot.insert(slot)
            }
        };
        let stride = step.work.iter().map(|w| self.policy.pages(w.id).len()).max().unwrap_or(0);
        self.arrays.clear(stride);
        for work in &step.work {
            if let Some(sequence) = self.sequences.get(&work.id) {
                let pages = self.policy.pages(work.id);
                self.arrays.push(work, sequence.tokens(), pages, || sequence.sample_row());
            }
        }
        let (shared, sequences) = (&self.shared, &self.sequences);
        let given_up = || {
            let inbox = shared.inbox.lock();
            let unwanted =
                |id| inbox.cancels.contains(id) || sequences.get(id).is_none_or(|s| s.job.events.is_closed());
            inbox.stop || step.work.iter().all(|work| unwanted(&work.id))
        };
        let device = StepDevice {
            backend: self.backend.as_mut(),
            residency: &mut self.residency,
            model: step.model,
            parts: room.model.plan.program.part_count(),
            slot,
            heartbeat: &shared.heartbeat,
            given_up: &given_up,
        };
        let drawn = step::run(device, &self.arrays);
        let result = drawn.and_then(|drawn| Ok((drawn, self.backend.load_wait()?)));
        if result.is_err() {
            self.residency.forget_handles(step.model); // what is on its way may fail yet
        }
        result
    }

    fn deliver(&mut self, step: &StepPlan, sampled: Vec<Drawn>, load: Duration) {
        let now = lock::now();
        self.counters.load_waits += u64::from(!load.is_zero());
        self.counters.load_wait += load;
        self.policy.complete(step, now);
        self.counters.steps += 1;
        self.counters.step_sequences += step.work.len() as u64;
        let mut sampled = sampled.into_iter();
        for work in &step.work {
            let rows = u64::from(work.rows);
            self.counters.rows += rows;
            *(if work.decode { &mut self.counters.decode_rows } else { &mut self.counters.prefill_rows }) +=
                rows;
            let Some(sequence) = self.sequences.get_mut(&work.id) else { continue };
            sequence.add_load(load);
            if !work.samples {
                continue;
            }
            let token = match sampled.next() {
                None => continue,
                Some(Ok(token)) => token,
                Some(Err(error)) => {
                    tracing::warn!(model = step.model.0, %error, "no token could be drawn");
                    self.fail(work.id, JobError::Backend(error));
                    continue;
                }
            };
            let (batch, reason) = sequence.accept(token, now);
            let heard = sequence.send(Event::Tokens(batch));
            if let Some(reason) = reason {
                let done = Event::Done(sequence.outcome(reason));
                self.end(work.id, done);
            } else if !heard {
                self.fail(work.id, JobError::Cancelled);
            }
        }
    }

    fn fail(&mut self, id: SequenceId, error: JobError) {
        self.end(id, Event::Failed(error));
    }

    fn fail_all(&mut self, error: impl Fn() -> JobError) {
        let ids: Vec<SequenceId> = self.sequences.keys().copied().collect();
        for id in ids {
            self.fail(id, error());
        }
    }

    /// Fails all sequences of a model whose file can no longer be trusted, and lets go of it.
    fn fail_model(&mut self, id: ModelId, error: MapError) {
        tracing::warn!(model = id.0, %error, "the model's requests fail");
        let error = Arc::new(error);
        for sequence in self.policy.sequences_of(id) {
            self.fail(sequence, JobError::Model(Arc::clone(&error)));
        }
        // What they brought would have no room any more by which it is found.
        self.fail_loads(Some(id), &|| JobError::Model(Arc::clone(&error)));
        if let Some(room) = self.rooms.get_mut(&id) {
            room.gone = true;
        }
        self.close_if_gone(id);
    }

    /// Takes a sequence out and gives its pages back. Its last event goes out with [`Core::settle`].
    fn end(&mut self, id: SequenceId, event: Event) {
        let Some(sequence) = self.sequences.remove(&id) else { return };
        match event {
            Event::Done(_) => self.counters.sequences_done += 1,
            Event::Failed(JobError::Cancelled) => self.counters.sequences_cancelled += 1,
            _ => self.counters.sequences_failed += 1,
        }
        self.ended.push((sequence, event)); // before the device is touched: a panic there must not swallow the event
        if let Some(removed) = self.policy.remove(id)
            && let Some(slot) = self.rooms.get(&removed.model).and_then(|r| r.slot)
            && !removed.pages.is_empty()
        {
            self.backend.release_pages(slot, &removed.pages);
        }
    }

    /// Publishes a snapshot without the sequences that ended, then sends their last events.
    fn settle(&mut self) {
        let ended = std::mem::take(&mut self.ended);
        let now = lock::now();
        for id in ended.iter().map(|(s, _)| s.job.model.id).collect::<HashSet<_>>() {
            if self.policy.sequences_of(id).is_empty()
                && let Some(room) = self.rooms.get_mut(&id)
            {
                room.idle_since.get_or_insert(now);
            }
            self.close_if_gone(id);
        }
        {
            let mut inbox = self.shared.inbox.lock();
            for (sequence, _) in &ended {
                inbox.live.remove(&sequence.job.id);
                inbox.cancels.remove(&sequence.job.id);
                inbox.credits.remove(&sequence.job.id);
            }
        }
        self.publish();
        for (sequence, event) in ended {
            sequence.send(event);
        }
    }

    /// Gives scratch and KV pool of long idle models back; models that nobody else holds go altogether.
    fn housekeep(&mut self, now: Instant) {
        if now.saturating_duration_since(self.housekept) < IDLE_WAKE.min(self.options.idle_release) {
            return;
        }
        self.housekept = now;
        self.look_at_strays();
        self.expire_idle(now);
        if self.sequences.is_empty() && self.loads.is_empty() {
            self.backend.trim();
        }
        let ids: Vec<ModelId> = self.rooms.keys().copied().collect();
        for id in ids {
            let Some(room) = self.rooms.get_mut(&id) else { continue };
            let Some(since) = room.idle_since else { continue };
            room.gone |= Arc::strong_count(&room.model) == HOLDERS;
            if now.saturating_duration_since(since) >= self.options.idle_release
                && let Some(slot) = room.slot.take()
            {
                self.backend.close_model(slot);
                self.policy.close_pool(id);
            }
            self.close_if_gone(id);
        }
    }

    /// Lets go of an unloaded model without sequences: room, device copies, mapping.
    fn close_if_gone(&mut self, id: ModelId) {
        if !self.rooms.get(&id).is_some_and(|r| r.gone) || !self.policy.sequences_of(id).is_empty() {
            return;
        }
        let Some(room) = self.rooms.remove(&id) else { return };
        if let Some(slot) = room.slot {
            self.backend.close_model(slot);
        }
        self.policy.close_pool(id);
        self.retire();
        self.residency.leave(id);
    }

    /// Before weights leave between steps. Where the device does not answer, the next step finds out.
    fn retire(&mut self) {
        if let Err(error) = self.backend.retire() {
            tracing::warn!(%error, "weights leave a device that does not answer well");
        }
    }
}

fn limits(options: &EngineOptions, shared: &Shared) -> Limits {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let facts = shared.facts();
    Limits {
        rows_max: count(facts.limits.rows),
        sequences_max: count(options.sequences_max),
        kv_budget_bytes: facts.kv_budget_bytes,
        slow_reader: options.slow_reader,
    }
}

/// Room on the device for a model.
fn open(
    backend: &mut dyn Backend,
    policy: &Policy,
    shared: &Shared,
    model: &Model,
) -> Result<ModelSlot, BackendError> {
    let (facts, program) = (shared.facts(), &model.plan.program);
    let pages = policy.pool_pages(facts.page_bytes(program));
    backend.open_model(program, facts.limits, pages)
}
