//! What sessions hold of an engine: a handle that never waits for a step.
//!
//! Commands go through an inbox under one short lock (never held across an await or a step). Its bounds: `jobs` by
//! [`EngineOptions::queue_max`](super::EngineOptions), everything else by the sequences that are live, because a
//! command for a sequence that is not live is dropped at once. Lock order: `inbox`, then `published` or
//! `facts`.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{broadcast, oneshot, watch};

use super::core::orders::{Cleared, Order, RulesChange};
use super::loading::{LoadProgress, LoadTarget, LoadedTensor, Loading, Preload};
use super::loads::LoadRequest;
use super::residency::ResidencyRules;
use super::snapshot::EngineEvent;
use super::{EngineSnapshot, Job, JobError, SequenceId, sequence_pages};
use crate::backend::{Backend, BackendError, BackendInfo, StepLimits};
use crate::lock::{Condvar, Mutex, Rank};
use crate::model::{Model, ModelId};
use crate::program::Program;
use crate::tensor::LazyTensor;

/// Events that a watcher may be behind: two for each layer of a few large models.
const EVENTS_KEPT: usize = 1024;

/// What waits for the engine thread.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub jobs: VecDeque<Job>,
    pub cancels: HashSet<SequenceId>,
    pub credits: HashMap<SequenceId, u32>,
    /// Models to let go of. Bounded by the models that are mapped.
    pub gone: HashSet<ModelId>,
    /// Loads asked for without a step; at most `queue_max`.
    pub loads: Vec<LoadRequest>,
    /// What else is to be done about weights; at most `queue_max`.
    pub orders: Vec<Order>,
    /// A load was decided.
    pub woken: bool,
    /// Sequences submitted and not yet ended.
    pub live: HashSet<SequenceId>,
    /// How many of `live` are not admitted yet.
    pub queued: usize,
    /// New work is refused from here on; what runs at this moment is failed.
    pub drain: Option<Instant>,
    pub stop: bool,
}

/// What the engine thread takes out of the inbox in one go.
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
    /// True when the engine has something to take.
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

    /// Empties the inbox; what is live, a drain and a stop stay.
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

/// What the engine thread and its handles share.
#[derive(Debug)]
pub(super) struct Shared {
    pub inbox: Mutex<Inbox>,
    pub wake: Condvar,
    pub heartbeat: Arc<AtomicU64>,
    pub published: Mutex<Arc<EngineSnapshot>>,
    /// True once a drain has emptied the engine, or its thread has ended.
    pub drained: watch::Sender<bool>,
    /// True once the thread has ended without having been stopped.
    pub failed: watch::Sender<bool>,
    pub queue_max: usize,
    /// What happens on the device. Who is slow misses some and is told how many.
    pub events: broadcast::Sender<EngineEvent>,
    /// Of the device in use; another one after a loss. Innermost lock: held for a clone.
    facts: Mutex<Arc<Facts>>,
    next_id: AtomicU64,
}

/// What is fixed about a device from its opening on.
#[derive(Debug)]
pub(super) struct Facts {
    pub info: BackendInfo,
    refuses: fn(&Program) -> Option<BackendError>,
    pub kv_budget_bytes: u64,
    kv_page_bytes: fn(&Program) -> u64,
    weight_bytes: fn(&LazyTensor) -> u64,
    scratch_bytes: fn(&Program, StepLimits) -> u64,
    /// Rows of a step at most.
    pub limits: StepLimits,
}

impl Facts {
    fn of(backend: &dyn Backend, options: &EngineOptions) -> Self {
        let most = backend.kv_bytes_max().unwrap_or(u64::MAX);
        let info = backend.info();
        let rows_max = options.rows_max.unwrap_or_else(|| info.step_rows.max(options.sequences_max)).max(1);
        Self {
            info,
            weight_bytes: backend.weight_bytes(),
            scratch_bytes: backend.scratch_bytes(),
            limits: StepLimits { rows: rows_max, wanted_rows: options.sequences_max.clamp(1, rows_max) },
            refuses: backend.refuses(),
            kv_budget_bytes: options.kv_budget_bytes.min(most),
            kv_page_bytes: backend.kv_page_bytes(),
        }
    }

    /// Bytes that a tensor takes on this device.
    pub fn weight_bytes(&self, tensor: &LazyTensor) -> u64 {
        (self.weight_bytes)(tensor)
    }

    /// Bytes that a model's activations take on this device.
    pub fn scratch_bytes(&self, program: &Program) -> u64 {
        (self.scratch_bytes)(program, self.limits)
    }

    /// Bytes of one KV page of a model on this device.
    pub fn page_bytes(&self, program: &Program) -> u64 {
        (self.kv_page_bytes)(program)
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
            events: broadcast::Sender::new(EVENTS_KEPT),
            facts: Mutex::new(Rank::DeviceFacts, Arc::new(Facts::of(backend, options))),
            next_id: AtomicU64::new(1),
        }
    }

    /// What is fixed about the device in use.
    pub(super) fn facts(&self) -> Arc<Facts> {
        Arc::clone(&self.facts.lock())
    }

    /// Another device is in use from now on.
    pub(super) fn set_device(&self, backend: &dyn Backend, options: &EngineOptions) {
        *self.facts.lock() = Arc::new(Facts::of(backend, options));
    }
}

/// An engine as its clients see it. Cheap to clone; no call waits for a step.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    pub(super) shared: Arc<Shared>,
}

impl EngineHandle {
    /// A number for a new sequence.
    pub fn new_sequence_id(&self) -> SequenceId {
        SequenceId(self.shared.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// What computes now.
    pub fn info(&self) -> BackendInfo {
        self.shared.facts().info.clone()
    }

    /// Whether the backend can run `program`: to refuse a model when it is loaded, by name.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`], naming the first tensor of a type it has no arithmetic for; [`BackendError::Operation`].
    pub fn check_program(&self, program: &Program) -> Result<(), BackendError> {
        (self.shared.facts().refuses)(program).map_or(Ok(()), Err)
    }

    /// Bytes of KV cache that a sequence of `positions` tokens reserves while it runs: whole pages of
    /// [`KV_PAGE_TOKENS`](crate::backend::KV_PAGE_TOKENS).
    pub fn kv_bytes(&self, program: &Program, positions: u32) -> u64 {
        u64::from(sequence_pages(positions)).saturating_mul(self.shared.facts().page_bytes(program))
    }

    /// Hands over a request. On success its last event will be `Done` or `Failed`, always; on failure no event comes.
    ///
    /// # Errors
    /// [`JobError::QueueFull`], [`JobError::Draining`], [`JobError::DoesNotFit`], [`JobError::Model`] (the file lost
    /// bytes), [`JobError::Backend`] (a tensor type), [`JobError::Invalid`] (a bug of the caller).
    pub fn submit(&self, job: Job) -> Result<(), JobError> {
        job.check()?;
        job.model.files.check_poison()?;
        self.check_program(&job.model.plan.program)?;
        let need_bytes = self.kv_bytes(&job.model.plan.program, job.positions());
        let budget_bytes = self.shared.facts().kv_budget_bytes;
        if need_bytes > budget_bytes {
            return Err(JobError::DoesNotFit { context_tokens: job.positions(), need_bytes, budget_bytes });
        }
        let mut inbox = self.shared.inbox.lock();
        if inbox.stop || inbox.drain.is_some() {
            return Err(JobError::Draining);
        }
        if inbox.queued >= self.shared.queue_max {
            let limit = u32::try_from(self.shared.queue_max).unwrap_or(u32::MAX);
            return Err(JobError::QueueFull { queued: limit, limit });
        }
        if !inbox.live.insert(job.id) {
            return Err(JobError::Invalid("a sequence number was used twice"));
        }
        inbox.queued += 1;
        inbox.jobs.push_back(job);
        drop(inbox);
        self.shared.wake.notify_one();
        Ok(())
    }

    /// Brings one tensor of a model to the device, as a step would, and waits until it is there. Callers of the same tensor
    /// share one load. The runtime is not blocked.
    ///
    /// # Errors
    /// [`JobError::Invalid`] where the model has no such tensor, [`JobError::Backend`] of the load, those of
    /// [`EngineHandle::submit`].
    pub async fn load_tensor(&self, model: &Arc<Model>, name: &str) -> Result<LoadedTensor, JobError> {
        if !model.plan.program.tensors().iter().any(|tensor| tensor.lazy.name() == name) {
            return Err(JobError::Invalid("the model has no tensor of that name"));
        }
        let reached = self.begin_load(model, LoadTarget::Tensor(name.to_owned()))?.wait().await?;
        reached.last.ok_or(JobError::Invalid("a load ended without a tensor"))
    }

    /// Begins to bring all of a model's weights to the device, in the order a step needs them. A step that runs meanwhile
    /// shares what is there and on the way.
    ///
    /// # Errors
    /// Those of [`EngineHandle::submit`]; of the loads by [`Loading::wait`].
    pub fn preload_all(&self, model: &Arc<Model>) -> Result<Loading, JobError> {
        self.preload(model, &Preload::All)
    }

    /// As [`EngineHandle::preload_all`] for the embedding and the first `layers` layers.
    ///
    /// # Errors
    /// As [`EngineHandle::preload_all`].
    pub fn preload_layers(&self, model: &Arc<Model>, layers: u32) -> Result<Loading, JobError> {
        self.preload(model, &Preload::First(layers))
    }

    /// As [`EngineHandle::preload_all`] for some of the weights.
    ///
    /// # Errors
    /// As [`EngineHandle::preload_all`], and [`JobError::NoSuchLayer`].
    pub fn preload(&self, model: &Arc<Model>, what: &Preload) -> Result<Loading, JobError> {
        let none = |layer| JobError::NoSuchLayer { layer, layers: model.plan.program.layer_count() };
        self.begin_load(model, LoadTarget::Parts(what.parts(&model.plan.program).map_err(none)?))
    }

    /// Sends weights away from the device: of one model, pinned or not, or of all that are not pinned. Sequences go on; what
    /// they need is brought again.
    ///
    /// # Errors
    /// [`JobError::Draining`], [`JobError::QueueFull`].
    pub async fn clear_gpu_cache(&self, model: Option<ModelId>) -> Result<Cleared, JobError> {
        let (done, cleared) = oneshot::channel();
        self.order(Order::Clear { model, done })?;
        cleared.await.map_err(|_| JobError::Draining)
    }

    /// Sends away what nobody uses at this moment: weights of models without sequences that are not pinned, and their
    /// activations. For when memory is short elsewhere.
    ///
    /// # Errors
    /// As [`EngineHandle::clear_gpu_cache`].
    pub async fn release_idle(&self) -> Result<Cleared, JobError> {
        let (done, cleared) = oneshot::channel();
        self.order(Order::ReleaseIdle { done })?;
        cleared.await.map_err(|_| JobError::Draining)
    }

    /// Changes what is wanted for a model, which counts until it is unloaded. What is wanted from now on.
    ///
    /// # Errors
    /// As [`EngineHandle::clear_gpu_cache`].
    pub async fn set_rules(
        &self,
        model: &Arc<Model>,
        change: RulesChange,
    ) -> Result<ResidencyRules, JobError> {
        let (done, rules) = oneshot::channel();
        self.order(Order::Rules { model: Arc::clone(model), change, done })?;
        rules.await.map_err(|_| JobError::Draining)
    }

    fn order(&self, order: Order) -> Result<(), JobError> {
        let mut inbox = self.shared.inbox.lock();
        if inbox.stop || inbox.drain.is_some() {
            return Err(JobError::Draining);
        }
        if inbox.orders.len() >= self.shared.queue_max {
            let limit = u32::try_from(self.shared.queue_max).unwrap_or(u32::MAX);
            return Err(JobError::QueueFull { queued: limit, limit });
        }
        inbox.orders.push(order);
        drop(inbox);
        self.shared.wake.notify_one();
        Ok(())
    }

    /// What happens on the device from now on.
    pub fn events(&self) -> broadcast::Receiver<EngineEvent> {
        self.shared.events.subscribe()
    }

    /// What is fixed about the device in use.
    pub(super) fn facts(&self) -> Arc<Facts> {
        self.shared.facts()
    }

    fn begin_load(&self, model: &Arc<Model>, target: LoadTarget) -> Result<Loading, JobError> {
        model.files.check_poison()?;
        self.check_program(&model.plan.program)?;
        let (progress, receiver) = watch::channel(LoadProgress::default());
        let mut inbox = self.shared.inbox.lock();
        if inbox.stop || inbox.drain.is_some() {
            return Err(JobError::Draining);
        }
        if inbox.loads.len() >= self.shared.queue_max {
            let limit = u32::try_from(self.shared.queue_max).unwrap_or(u32::MAX);
            return Err(JobError::QueueFull { queued: limit, limit });
        }
        inbox.loads.push(LoadRequest { model: Arc::clone(model), target, progress });
        drop(inbox);
        self.shared.wake.notify_one();
        Ok(Loading { progress: receiver })
    }

    /// Takes a request back: it ends with [`JobError::Cancelled`], after the step that is under way. Unknown or ended
    /// ones are ignored.
    pub fn cancel(&self, id: SequenceId) {
        let mut inbox = self.shared.inbox.lock();
        if inbox.live.contains(&id) {
            inbox.cancels.insert(id);
            drop(inbox);
            self.shared.wake.notify_one();
        }
    }

    /// Allows `items` more [`Event::Tokens`](super::Event::Tokens). Unknown or ended sequences are ignored.
    pub fn credit(&self, id: SequenceId, items: u32) {
        let mut inbox = self.shared.inbox.lock();
        if inbox.live.contains(&id) {
            let credit = inbox.credits.entry(id).or_default();
            *credit = credit.saturating_add(items);
            drop(inbox);
            self.shared.wake.notify_one();
        }
    }

    /// Lets go of an unloaded model: scratch, KV pool and device copies, when its last sequence ends, or at once.
    pub fn model_gone(&self, id: ModelId) {
        let mut inbox = self.shared.inbox.lock();
        if !inbox.stop {
            inbox.gone.insert(id);
            drop(inbox);
            self.shared.wake.notify_one();
        }
    }

    /// What the engine did and has, as of its last step or at most some 50 ms ago. A sequence whose last event was
    /// received is in it no more.
    pub fn snapshot(&self) -> Arc<EngineSnapshot> {
        Arc::clone(&self.shared.published.lock())
    }

    /// Refuses new work from now on, fails what waits, lets what runs go on until `deadline`, then fails it with
    /// [`JobError::Draining`]. A later call may bring the deadline forward.
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

    /// Waits until the engine has ended by itself, which it does when a panic took its device and no other could be
    /// opened: no request will be answered any more.
    pub async fn failed(&self) {
        // As in `drained`.
        let _ = self.shared.failed.subscribe().wait_for(|failed| *failed).await;
    }

    /// A count that moves with every unit of a step, while the device or weights are waited for (which ends by itself), and at
    /// least once a second when idle. When it stands, the engine hangs.
    pub fn heartbeat(&self) -> u64 {
        self.shared.heartbeat.load(Ordering::Relaxed)
    }
}

/// How an engine behaves.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Most rows of one step; at least 1. `None`: what suits the device that is opened first.
    pub rows_max: Option<usize>,
    /// Most sequences admitted at once; at most `rows_max`, so that every one gets a row in each step of its model.
    pub sequences_max: usize,
    /// Most requests that wait for admission.
    pub queue_max: usize,
    /// KV cache of all models together.
    pub kv_budget_bytes: u64,
    /// A sequence that had no credit for this long fails.
    pub slow_reader: Duration,
    /// A model without sequences for this long gives its scratch and KV pool back; its device copies stay.
    pub idle_release: Duration,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            rows_max: None,
            sequences_max: 32,
            queue_max: 1024,
            kv_budget_bytes: 4 << 30,
            slow_reader: Duration::from_secs(30),
            idle_release: Duration::from_secs(60),
        }
    }
}
