//! The sessions' view of an engine: a handle that never waits for a step.
//!
//! Commands go through an inbox under one short lock, which is never held across an await or a step.
//! [`EngineOptions::queue_max`](super::EngineOptions) bounds `jobs`, `loads` and `orders`; the mapped models bound
//! `gone`. The live sequences bound the rest, because a command for a sequence that is not live is dropped at once.
//! Lock order, by [`Rank`]: `Inbox` (`inbox`), `Snapshot` (`published`), `DeviceFacts` (`device`).

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{broadcast, oneshot, watch};

use super::core::orders::{Cleared, Order, RulesChange};
use super::facts::{Facts, VALUES_BYTES};
use super::loading::{LoadProgress, LoadTarget, LoadedTensor, Loading, Preload};
use super::loads::LoadRequest;
use super::paging::PageReader;
use super::prefixes::PrefixKeeper;
use super::residency::ResidencyRules;
use super::sequence::STATES;
use super::snapshot::EngineEvent;
use super::{EngineSnapshot, Job, JobError, Reuse, SequenceId};
use crate::backend::{Backend, BackendError, BackendInfo, KV_PAGE_TOKENS};
use crate::lock::{Condvar, Mutex, Rank};
use crate::model::{Model, ModelId};
use crate::numbers::Numbers;
use crate::program::Program;
use crate::share::limits::UserLimits;
use crate::share::{Charge, Shares, Taker};

/// Events that a watcher may lag behind: two for each layer of a few large models.
const EVENTS_KEPT: usize = 1024;

/// Commands for the engine thread.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub jobs: VecDeque<Job>,
    pub cancels: HashSet<SequenceId>,
    pub credits: HashMap<SequenceId, u32>,
    /// Unloaded models to remove. Bounded by the number of mapped models.
    pub gone: HashSet<ModelId>,
    /// Requested loads; at most `queue_max`.
    pub loads: Vec<LoadRequest>,
    /// Other orders about weights; at most `queue_max`.
    pub orders: Vec<Order>,
    /// A load completed or failed, or pages were read.
    pub woken: bool,
    /// Sequences submitted and not ended, each with its place in the queue until it is admitted for the first time.
    pub live: HashMap<SequenceId, Option<Charge>>,
    /// While set, new work is refused. At this instant running work fails.
    pub drain: Option<Instant>,
    pub stop: bool,
}

/// The commands that the engine thread takes from the inbox at once.
#[derive(Debug, Default)]
pub(super) struct Commands {
    pub jobs: VecDeque<Job>,
    pub cancels: HashSet<SequenceId>,
    pub credits: HashMap<SequenceId, u32>,
    pub gone: HashSet<ModelId>,
    pub loads: Vec<LoadRequest>,
    pub orders: Vec<Order>,
    pub drain: Option<Instant>,
    pub stop: bool,
}

impl Inbox {
    /// True when there is a command for the engine.
    pub(super) fn pending(&self) -> bool {
        self.stop
            || !self.jobs.is_empty()
            || !self.cancels.is_empty()
            || !self.credits.is_empty()
            || !self.gone.is_empty()
            || !self.loads.is_empty()
            || !self.orders.is_empty()
            || self.woken
    }

    /// Refuses more work if the engine drains or stops.
    fn check_open(&self) -> Result<(), JobError> {
        if self.stop || self.drain.is_some() { Err(JobError::Draining) } else { Ok(()) }
    }

    /// As [`Inbox::check_open`], and refuses more if `waiting` orders fill their queue of `max`.
    fn check(&self, waiting: usize, max: usize) -> Result<(), JobError> {
        self.check_open()?;
        if waiting >= max {
            let limit = u32::try_from(max).unwrap_or(u32::MAX);
            return Err(JobError::QueueFull { queued: limit, limit });
        }
        Ok(())
    }

    /// Empties the inbox, except for `live`, `drain` and `stop`.
    pub(super) fn take(&mut self) -> Commands {
        self.woken = false;
        Commands {
            jobs: std::mem::take(&mut self.jobs),
            cancels: std::mem::take(&mut self.cancels),
            credits: std::mem::take(&mut self.credits),
            gone: std::mem::take(&mut self.gone),
            loads: std::mem::take(&mut self.loads),
            orders: std::mem::take(&mut self.orders),
            drain: self.drain,
            stop: self.stop,
        }
    }
}

/// State that the engine thread shares with its handles.
#[derive(Debug)]
pub(super) struct Shared {
    pub inbox: Mutex<Inbox>,
    pub wake: Condvar,
    pub heartbeat: Arc<AtomicU64>,
    pub published: Mutex<Arc<EngineSnapshot>>,
    /// True once a drain has emptied the engine, or its thread has ended.
    pub drained: watch::Sender<bool>,
    /// True once the thread has ended without a request to stop.
    pub failed: watch::Sender<bool>,
    /// Most loads, and most orders, that wait.
    pub queue_max: usize,
    /// Places of sequences that were not admitted yet, of which each user has a share.
    pub queue: Arc<Shares>,
    /// Events of the device. A slow watcher misses events and learns how many.
    pub events: broadcast::Sender<EngineEvent>,
    /// The device in use; replaced after a device loss. Innermost lock: held for one clone or one lookup.
    device: Mutex<DeviceInUse>,
    numbers: Numbers,
    page_reader: PageReader,
}

/// A device, and models that it can compute.
#[derive(Debug)]
struct DeviceInUse {
    facts: Arc<Facts>,
    /// Models that were checked: a GPU binds a model to check it, which takes 0.3 ms for 32 layers, and every request asks.
    accepted: HashSet<ModelId>,
}

impl DeviceInUse {
    fn of(backend: &dyn Backend, options: &EngineOptions) -> Self {
        Self { facts: Arc::new(Facts::of(backend, options)), accepted: HashSet::new() }
    }
}

impl Shared {
    pub(super) fn new(backend: &dyn Backend, options: &EngineOptions) -> Self {
        Self {
            inbox: Mutex::new(Rank::Inbox, Inbox::default()),
            wake: Condvar::new(),
            heartbeat: Arc::default(),
            published: Mutex::new(Rank::Snapshot, Arc::default()),
            drained: watch::Sender::new(false),
            failed: watch::Sender::new(false),
            queue_max: options.queue_max,
            queue: Shares::new(options.queue_max as u64),
            events: broadcast::Sender::new(EVENTS_KEPT),
            device: Mutex::new(Rank::DeviceFacts, DeviceInUse::of(backend, options)),
            numbers: Numbers::default(),
            page_reader: options.page_reader.clone(),
        }
    }

    /// Fixed facts of the device in use.
    pub(super) fn facts(&self) -> Arc<Facts> {
        Arc::clone(&self.device.lock().facts)
    }

    /// Replaces the facts after a new device was opened.
    pub(super) fn set_device(&self, backend: &dyn Backend, options: &EngineOptions) {
        *self.device.lock() = DeviceInUse::of(backend, options);
    }
}

/// Sessions' handle to an engine. Cheap to clone; no call waits for a step.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    pub(super) shared: Arc<Shared>,
}

impl EngineHandle {
    /// Makes a number for a new sequence.
    pub fn new_sequence_id(&self) -> SequenceId {
        SequenceId(self.shared.numbers.draw())
    }

    /// The device in use.
    pub fn info(&self) -> BackendInfo {
        self.shared.facts().info.clone()
    }

    /// Checks that the backend can run `program`, so that a load can refuse an unsupported model.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`], which names the first tensor of an unsupported type; [`BackendError::Operation`].
    pub fn check_program(&self, program: &Program) -> Result<(), BackendError> {
        (self.shared.facts().refuses)(program).map_or(Ok(()), Err)
    }

    /// As [`EngineHandle::check_program`], once for each mapped model and device.
    ///
    /// # Errors
    /// As [`EngineHandle::check_program`].
    pub fn check_model(&self, model: &Model) -> Result<(), BackendError> {
        let facts = {
            let device = self.shared.device.lock();
            if device.accepted.contains(&model.id) {
                return Ok(());
            }
            Arc::clone(&device.facts)
        };
        (facts.refuses)(&model.plan.program).map_or(Ok(()), Err)?;
        let mut device = self.shared.device.lock();
        if Arc::ptr_eq(&device.facts, &facts) {
            device.accepted.insert(model.id);
        }
        Ok(())
    }

    /// Bytes of KV cache of a sequence of `positions` tokens: whole pages of [`KV_PAGE_TOKENS`], and recurrent states.
    pub fn kv_bytes(&self, program: &Program, positions: u32) -> u64 {
        self.shared.facts().sequence_bytes(program, positions)
    }

    /// Submits a request. On success its last event is always `Done` or `Failed`; on an error no event follows.
    ///
    /// # Errors
    /// [`JobError::NoPlace`], [`JobError::Draining`], [`JobError::DoesNotFit`], [`JobError::AboveShare`],
    /// [`JobError::Model`] (the file lost bytes), [`JobError::Backend`] (an unsupported model), [`JobError::Invalid`] (a bug of the caller).
    pub fn submit(&self, mut job: Job) -> Result<(), JobError> {
        job.check()?;
        job.model.files.check_poison()?;
        self.check_model(&job.model)?;
        self.check_room(&mut job)?;
        let place = self.shared.queue.take(Taker::of(job.uid), 1).map_err(JobError::NoPlace);
        let mut inbox = self.shared.inbox.lock();
        inbox.check_open()?;
        let Entry::Vacant(entry) = inbox.live.entry(job.id) else {
            return Err(JobError::Invalid("a sequence number was used twice"));
        };
        entry.insert(Some(place?));
        inbox.jobs.push_back(job);
        drop(inbox);
        self.shared.wake.notify_one();
        Ok(())
    }

    /// Refuses a request that would need more KV cache than its user may hold, if it were alone. One that asks for an answer
    /// to the end of the context gets the context that fits.
    fn check_room(&self, job: &mut Job) -> Result<(), JobError> {
        let (program, facts) = (&job.model.plan.program, self.shared.facts());
        let tokens = job.prompt.len();
        if program.encoder().is_some() && tokens > facts.limits_of(program).rows {
            let need_bytes = facts.row_bytes(program).saturating_mul(tokens as u64);
            return Err(JobError::WideText { tokens, need_bytes, most_bytes: VALUES_BYTES });
        }
        let of_states = facts.state_bytes(program).saturating_mul(STATES);
        let pages = facts.kv_user_bytes.saturating_sub(of_states) / facts.page_bytes(program).max(1);
        let most = u32::try_from(pages.saturating_mul(KV_PAGE_TOKENS as u64)).unwrap_or(u32::MAX);
        let prompt = u32::try_from(job.prompt.len()).unwrap_or(u32::MAX);
        if job.positions() <= most {
            return Ok(());
        }
        if job.positions() == job.context_tokens && prompt < most {
            job.context_tokens = most;
            return Ok(());
        }
        let (context_tokens, budget_bytes) = (job.positions(), facts.kv_budget_bytes);
        let need_bytes = self.kv_bytes(program, context_tokens);
        if need_bytes <= budget_bytes {
            let (share_bytes, percent) = (facts.kv_user_bytes, facts.kv_percent_per_user);
            return Err(JobError::AboveShare { context_tokens, need_bytes, share_bytes, percent });
        }
        Err(JobError::DoesNotFit { context_tokens, need_bytes, budget_bytes })
    }

    /// Loads one tensor of a model to the device, as a step would, and waits until it is resident. Callers of the same
    /// tensor share one load. Does not block the runtime.
    ///
    /// # Errors
    /// [`JobError::Invalid`] if the model has no such tensor, [`JobError::Backend`] of the load, and those of
    /// [`EngineHandle::submit`].
    pub async fn preload_tensor(&self, model: &Arc<Model>, name: &str) -> Result<LoadedTensor, JobError> {
        if !model.plan.program.tensors().iter().any(|tensor| tensor.lazy.name() == name) {
            return Err(JobError::Invalid("the model has no tensor of that name"));
        }
        let reached = self.ask(model, LoadTarget::Tensor(name.to_owned()))?.wait().await?;
        reached.last.ok_or(JobError::Invalid("a load ended without a tensor"))
    }

    /// Begins to load all of a model's weights to the device, in the order in which a step needs them. A step that runs
    /// meanwhile shares the resident tensors and those in flight.
    ///
    /// # Errors
    /// Those of [`EngineHandle::submit`]. [`Loading::wait`] returns the errors of the loads.
    pub fn preload_all(&self, model: &Arc<Model>) -> Result<Loading, JobError> {
        self.preload(model, &Preload::All)
    }

    /// As [`EngineHandle::preload_all`] for some of the weights.
    ///
    /// # Errors
    /// As [`EngineHandle::preload_all`], and [`JobError::NoSuchLayer`].
    pub fn preload(&self, model: &Arc<Model>, what: &Preload) -> Result<Loading, JobError> {
        let none = |layer| JobError::NoSuchLayer { layer, layers: model.plan.program.layer_count() };
        self.ask(model, LoadTarget::Parts(what.parts(&model.plan.program).map_err(none)?))
    }

    /// Evicts weights from the device: those of one model, pinned or not, or of all models that are not pinned.
    /// Sequences continue; their steps load the weights again.
    ///
    /// # Errors
    /// [`JobError::Draining`], [`JobError::QueueFull`].
    pub async fn evict_weights(&self, model: Option<ModelId>) -> Result<Cleared, JobError> {
        let (done, cleared) = oneshot::channel();
        self.order(Order::Clear { model, done })?;
        cleared.await.map_err(|_| JobError::Draining)
    }

    /// Evicts weights of unpinned models without sequences, and frees activations of all models without sequences. For
    /// a memory shortage elsewhere.
    ///
    /// # Errors
    /// As [`EngineHandle::evict_weights`].
    pub async fn release_idle(&self) -> Result<Cleared, JobError> {
        let (done, cleared) = oneshot::channel();
        self.order(Order::ReleaseIdle { done })?;
        cleared.await.map_err(|_| JobError::Draining)
    }

    /// Changes the rules of a model; they last until it is unloaded. Returns the rules in force.
    ///
    /// # Errors
    /// As [`EngineHandle::evict_weights`].
    pub async fn set_rules(
        &self,
        model: &Arc<Model>,
        change: RulesChange,
    ) -> Result<ResidencyRules, JobError> {
        let (done, rules) = oneshot::channel();
        self.order(Order::Rules { model: Arc::clone(model), change, done })?;
        rules.await.map_err(|_| JobError::Draining)
    }

    pub(super) fn order(&self, order: Order) -> Result<(), JobError> {
        let mut inbox = self.shared.inbox.lock();
        inbox.check(inbox.orders.len(), self.shared.queue_max)?;
        inbox.orders.push(order);
        drop(inbox);
        self.shared.wake.notify_one();
        Ok(())
    }

    /// Subscribes to the device's events from now on.
    pub fn events(&self) -> broadcast::Receiver<EngineEvent> {
        self.shared.events.subscribe()
    }

    /// Fixed facts of the device in use.
    pub(super) fn facts(&self) -> Arc<Facts> {
        self.shared.facts()
    }

    /// Asks the engine thread for weights, which [`super::device::Device::ask`] takes up.
    fn ask(&self, model: &Arc<Model>, target: LoadTarget) -> Result<Loading, JobError> {
        model.files.check_poison()?;
        self.check_model(model)?;
        let (progress, receiver) = watch::channel(LoadProgress::default());
        let mut inbox = self.shared.inbox.lock();
        inbox.check(inbox.loads.len(), self.shared.queue_max)?;
        inbox.loads.push(LoadRequest { model: Arc::clone(model), target, progress });
        drop(inbox);
        self.shared.wake.notify_one();
        Ok(Loading { progress: receiver })
    }

    /// Cancels a request: it ends with [`JobError::Cancelled`] after the step in progress. Ignores unknown or ended
    /// sequences.
    pub fn cancel(&self, id: SequenceId) {
        let mut inbox = self.shared.inbox.lock();
        if inbox.live.contains_key(&id) {
            inbox.cancels.insert(id);
            drop(inbox);
            self.shared.wake.notify_one();
        }
    }

    /// Grants `items` more [`Event::Tokens`](super::Event::Tokens). Ignores unknown or ended sequences.
    pub fn credit(&self, id: SequenceId, items: u32) {
        let mut inbox = self.shared.inbox.lock();
        if inbox.live.contains_key(&id) {
            let credit = inbox.credits.entry(id).or_default();
            *credit = credit.saturating_add(items);
            drop(inbox);
            self.shared.wake.notify_one();
        }
    }

    /// Frees an unloaded model's activations, KV pool and weights when its last sequence ends, or at once if it has
    /// none.
    pub fn model_gone(&self, id: ModelId) {
        self.shared.device.lock().accepted.remove(&id);
        let mut inbox = self.shared.inbox.lock();
        if !inbox.stop {
            inbox.gone.insert(id);
            drop(inbox);
            self.shared.wake.notify_one();
        }
    }

    /// The engine's state as of its last step, or at most some 50 ms ago. Does not contain a sequence whose last event
    /// was received.
    pub fn snapshot(&self) -> Arc<EngineSnapshot> {
        Arc::clone(&self.shared.published.lock())
    }

    /// Starts a drain: refuses new work and fails waiting sequences. Running sequences continue until `deadline`, then
    /// fail with [`JobError::Draining`]. A later call may make the deadline earlier, never later.
    pub fn drain(&self, deadline: Instant) {
        let mut inbox = self.shared.inbox.lock();
        inbox.drain = Some(inbox.drain.map_or(deadline, |d| d.min(deadline)));
        drop(inbox);
        self.shared.wake.notify_one();
    }

    /// Waits until a drain has emptied the engine, or its thread has ended.
    pub async fn drained(&self) {
        // The sender lives in `shared`, which this handle keeps: waiting cannot fail.
        let _ = self.shared.drained.subscribe().wait_for(|done| *done).await;
    }

    /// Waits until the engine has ended by itself: it lost its device to a panic or a fault, and no other could be
    /// opened. No request is answered after that.
    pub async fn failed(&self) {
        // As in `drained`.
        let _ = self.shared.failed.subscribe().wait_for(|failed| *failed).await;
    }

    /// Threads that read pages of weights from a disk that does not answer.
    pub fn lost_readers(&self) -> usize {
        self.shared.page_reader.lost()
    }

    /// A counter of progress. It moves after each call of `Backend::run`, and at least once a second when
    /// idle. It also moves
    /// during waits for the device or for weights, which have a time limit. A counter that stands still means that the
    /// engine hangs.
    pub fn heartbeat(&self) -> u64 {
        self.shared.heartbeat.load(Ordering::Relaxed)
    }
}

/// Limits and times of an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Most rows of one step; at least 1. `None`: the row count that suits the first device opened.
    pub rows_max: Option<usize>,
    /// Most sequences admitted at once; at most `rows_max`, so that each gets a row in every step of its model. `None`: as
    /// many as suit the first device opened.
    pub sequences_max: Option<usize>,
    /// Most requests that wait for admission.
    pub queue_max: usize,
    /// Most bytes of KV cache for all models together.
    pub kv_budget_bytes: u64,
    /// Most of that that one user's admitted sequences may hold, in percent: 1 to 100.
    pub kv_percent_per_user: u32,
    /// The users whose prompts a request may share keys and values with.
    pub reuse: Reuse,
    /// A sequence that had no credit for this long fails.
    pub slow_reader: Duration,
    /// Users whose requests do not wait for places that other users' sequences hold.
    pub privileged: Vec<u32>,
    /// Limits of users, for their shares of the device's time.
    pub users: Arc<UserLimits>,
    /// A model without sequences for this long frees its activations and KV pool; its weights stay.
    pub idle_release: Duration,
    /// How pages of weights are read that a device uses in the file.
    pub page_reader: PageReader,
    /// Most host memory for pages of parked sequences, in bytes; 0: their tokens are computed again.
    pub swap_bytes: u64,
    /// Takes the known prefixes of KV pools that close.
    pub keeper: Option<Arc<dyn PrefixKeeper>>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            rows_max: None,
            sequences_max: None,
            queue_max: 1024,
            kv_budget_bytes: 4 << 30,
            kv_percent_per_user: 100,
            reuse: Reuse::default(),
            slow_reader: Duration::from_secs(30),
            privileged: Vec::new(),
            users: Arc::default(),
            idle_release: Duration::from_secs(60),
            page_reader: PageReader::default(),
            swap_bytes: 0,
            keeper: None,
        }
    }
}
