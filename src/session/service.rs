//! State that all sessions share: models, engine, limits, counters.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::hash::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rocmforge_client::wire::{ErrorCode, ServerOffer};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::budget::Budget;
use super::drafting::DraftModels;
use super::error::{Failure, failure};
use super::events::ModelEvents;
use super::host::PageCounts;
use super::logged::LoggedUids;
use super::pace::Pace;
use super::policy::Policy;
use super::repeats::Repeats;
use super::restore::Restores;
use super::sessions::Sessions;
use super::text_time::TextTime;
use super::turns::{Turn, Turns};
use crate::aside::ReceivedFd;
use crate::backend::doctor::Doctor;
use crate::lock::{Mutex, Rank};
use crate::model::constraint::Trial;
use crate::model::store::Store;
use crate::model::template::Renderer;
use crate::prefixes::PrefixStore;
use crate::prefixes::sessions::KeptSession;
use crate::scheduler::{EngineHandle, SequenceId};
use crate::share::Shares;
use crate::share::limits::UserLimits;

/// Most requests that block a thread at once (opening models, tokenising, rendering), in all and for one uid.
pub const BLOCKING_MAX: usize = 64;
const BLOCKING_MAX_OF_UID: usize = 16;

/// Most chat templates rendered at once within users' allowances, in all and for one uid. Their processes, with those of
/// [`RENDERING_LATER_MAX`], take at most 1.5 GiB together.
const RENDERING_MAX: usize = 4;
const RENDERING_MAX_OF_UID: usize = 1;

/// Most chat templates rendered at once for users whose allowance is used up, one for each.
const RENDERING_LATER_MAX: usize = 2;

/// Longest wait for a turn to render a chat template.
const RENDERING_WAIT: Duration = Duration::from_secs(5);

/// Most lines of the log in ten seconds about one uid's failed requests and refused frames.
const LOG_LINES_MAX: u32 = 20;

/// Bounds on requests, from the configuration.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Most positions of one sequence.
    pub context_tokens: u32,
    /// Limits of users. [`UserLimits::of`] bounds the requests of one uid that hold a ticket at once, queued and running.
    pub users: Arc<UserLimits>,
    /// Most bytes of payloads of unanswered requests, and as many of unread answers.
    pub request_bytes: u64,
    /// Most descriptors of unanswered requests.
    pub descriptors: u64,
    /// The program that renders chat templates, tries constraints and inspects GPUs: `rocmforged` itself, see [`Renderer`],
    /// [`Trial`] and [`Doctor`].
    pub program: PathBuf,
}

/// Keeps state across a restart of the daemon.
pub trait OutlivesRestart: std::fmt::Debug + Send + Sync {
    /// Stores the state after a client passed or unloaded a model, or changed rules. Blocks until it is stored.
    fn keep_state(&self);

    /// The kept state as text for display.
    fn report(&self) -> String;
}

/// State that all sessions share.
#[derive(Debug)]
pub struct Service {
    pub(super) store: Arc<Store>,
    pub(super) engine: EngineHandle,
    pub(super) settings: Settings,
    /// Publishes model events.
    pub(super) events: ModelEvents,
    pub(super) renderer: Renderer,
    pub(super) trial: Trial,
    pub(super) doctor: Doctor,
    /// Memory and descriptors that users' requests and answers share.
    pub budget: Budget,
    pub(super) repeats: Mutex<Repeats>,
    pub(super) sessions: Arc<Sessions>,
    pub(super) blocking: Arc<Turns>,
    rendering: Arc<Turns>,
    rendering_later: Arc<Turns>,
    pub(super) text_time: TextTime,
    pub(super) pace: Pace,
    /// Decides where rounded counts jump.
    pub(super) secret: RandomState,
    pub(super) page_counts: PageCounts,
    /// Requests of all sessions; the daemon waits for them when it stops.
    pub(super) tasks: TaskTracker,
    /// Source and count of memory-pressure events.
    pub pressure: Pressure,
    kept: OnceLock<Arc<dyn OutlivesRestart>>,
    pub(super) restores: OnceLock<Arc<Restores>>,
    policy: Mutex<Arc<Policy>>,
    draft_models: Mutex<Arc<DraftModels>>,
    pub(super) started: Instant,
    /// Kept open: the status matters most when no descriptor is free.
    pub(super) memory_use: Option<File>,
    offer: ServerOffer,
    draining: AtomicBool,
    connections: Arc<Shares>,
    /// The last number of a connection.
    numbered: AtomicU64,
    active: Mutex<Active>,
    logged: Mutex<LoggedUids>,
}

/// Memory-pressure counters for reports.
#[derive(Debug, Default)]
pub struct Pressure {
    source: OnceLock<String>,
    events: AtomicU64,
}

impl Pressure {
    /// Sets the source of pressure events. Only the first call counts.
    pub fn watched(&self, source: String) {
        let _ = self.source.set(source);
    }

    /// Counts one pressure event.
    pub fn count(&self) {
        self.events.fetch_add(1, Ordering::Relaxed);
    }

    /// The source and its event count; the source is empty if nothing watches.
    pub fn report(&self) -> (&str, u64) {
        (self.source.get().map_or("", String::as_str), self.events.load(Ordering::Relaxed))
    }
}

/// Requests that hold a [`Ticket`]: tokens, loads to a device, subscriptions. [`UserLimits`] bound those of a uid.
#[derive(Debug, Default)]
struct Active {
    per_uid: HashMap<u32, u32>,
    askers: Askers,
    /// Token requests, from their arrival on.
    sequences: HashMap<SequenceId, Asked>,
}

/// The users of all requests that ever held a [`Ticket`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Askers {
    #[default]
    Nobody,
    One(u32),
    Several,
}

impl Askers {
    fn and(self, uid: u32) -> Self {
        match self {
            Self::Nobody => Self::One(uid),
            Self::One(only) if only == uid => self,
            _ => Self::Several,
        }
    }
}

/// A token request.
#[derive(Debug)]
struct Asked {
    uid: u32,
    /// The model name that its client used.
    model: String,
    arrived: Instant,
    /// The engine does not have it yet.
    preparing: bool,
    /// Cancelled by a request of another stream.
    stopped: CancellationToken,
}

/// A token request whose prompt is being tokenised or rendered.
#[derive(Debug)]
pub(super) struct Preparing {
    pub id: SequenceId,
    pub uid: u32,
    pub model: String,
    pub arrived: Instant,
}

/// A request for tokens, a load to a device or a subscription. It counts against its uid until the ticket drops.
#[derive(Debug)]
pub(super) struct Ticket {
    service: Arc<Service>,
    uid: u32,
    sequence: Option<SequenceId>,
}

impl Service {
    /// Shared state for all sessions of this daemon.
    pub fn new(
        store: Arc<Store>,
        engine: EngineHandle,
        settings: Settings,
        events: ModelEvents,
    ) -> Arc<Self> {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let offer = ServerOffer {
            server_id: (u128::from(random()) << 64 | u128::from(random())).to_le_bytes(),
            boot_id: uuid_bytes(boot_id.trim()),
            ..ServerOffer::default()
        };
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Arc::new(Self {
            store,
            engine,
            renderer: Renderer::new(&settings.program),
            trial: Trial::new(&settings.program),
            doctor: Doctor::new(&settings.program),
            budget: Budget::new(settings.request_bytes, settings.descriptors),
            settings,
            events,
            repeats: Mutex::new(Rank::Repeats, Repeats::default()),
            sessions: Sessions::new(),
            blocking: Turns::new(BLOCKING_MAX, BLOCKING_MAX_OF_UID),
            rendering: Turns::new(RENDERING_MAX, RENDERING_MAX_OF_UID),
            rendering_later: Turns::new(RENDERING_LATER_MAX, 1),
            page_counts: PageCounts::default(),
            text_time: TextTime::new(processors),
            pace: Pace::new(processors),
            secret: RandomState::new(),
            tasks: TaskTracker::new(),
            pressure: Pressure::default(),
            kept: OnceLock::new(),
            restores: OnceLock::new(),
            policy: Mutex::new(Rank::Policy, Arc::default()),
            draft_models: Mutex::new(Rank::DraftModels, Arc::default()),
            started: Instant::now(),
            memory_use: File::open("/proc/self/status").ok(),
            offer,
            draining: AtomicBool::new(false),
            connections: Shares::new(0),
            numbered: AtomicU64::new(0),
            active: Mutex::new(Rank::ActiveRequests, Active::default()),
            logged: Mutex::new(Rank::LoggedUids, LoggedUids::new(LOG_LINES_MAX)),
        })
    }

    /// Terms that the daemon offers in its hello.
    pub fn offer(&self) -> &ServerOffer {
        &self.offer
    }

    /// Replaces the policy, also for open connections.
    pub fn set_policy(&self, policy: Policy) {
        *self.policy.lock() = Arc::new(policy);
    }

    pub(super) fn policy(&self) -> Arc<Policy> {
        Arc::clone(&self.policy.lock())
    }

    /// Replaces the names of draft models, for later requests.
    pub fn set_draft_models(&self, models: DraftModels) {
        *self.draft_models.lock() = Arc::new(models);
    }

    pub(super) fn draft_models(&self) -> Arc<DraftModels> {
        Arc::clone(&self.draft_models.lock())
    }

    /// Limits of users.
    pub fn users(&self) -> &Arc<UserLimits> {
        &self.settings.users
    }

    /// The model store.
    pub fn store(&self) -> Arc<Store> {
        Arc::clone(&self.store)
    }

    /// Threads that wait for file systems that do not answer.
    pub(super) fn lost_threads(&self) -> usize {
        self.store.aside().lost() + ReceivedFd::lost_threads() + self.engine.lost_readers()
    }

    /// Sets the object that keeps state across restarts. Only the first call counts.
    pub fn keep(&self, kept: Arc<dyn OutlivesRestart>) {
        let _ = self.kept.set(kept);
    }

    /// Sets the files of kept prefixes. Only the first call counts.
    pub fn keep_prefixes(&self, prefixes: Arc<PrefixStore>) {
        let _ = self.restores.set(Arc::new(Restores::new(prefixes)));
    }

    /// Takes sessions of an earlier daemon back. Returns how many found room.
    pub fn restore_sessions(&self, sessions: Vec<KeptSession>) -> usize {
        self.sessions.restore(sessions, Instant::now())
    }

    /// The sessions to keep over a restart, as many as have at most that many bytes together.
    pub fn sessions_to_keep(&self, bytes_max: u64) -> Vec<KeptSession> {
        self.sessions.keep(bytes_max, Instant::now())
    }

    /// Call after models or their rules changed; see [`OutlivesRestart::keep_state`].
    pub(super) fn keep_state(&self) {
        if let Some(kept) = self.kept.get() {
            kept.keep_state();
        }
    }

    /// True if a client has passed a file in memory.
    pub(crate) fn has_files_in_memory(&self) -> bool {
        self.store.has_files_in_memory()
    }

    /// Unloads passed files in memory that have lost their names, also from what outlives a restart: the service manager holds them
    /// too.
    pub(crate) fn unload_nameless(&self) {
        if self.store.unload_nameless() > 0 {
            self.keep_state();
        }
    }

    /// Text about the kept state; empty if nothing keeps state. Blocks while the state is being stored.
    pub(super) fn kept(&self) -> String {
        self.kept.get().map(|kept| kept.report()).unwrap_or_default()
    }

    /// Refuses new work with `ServerDraining` from now on.
    pub fn start_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// True once [`Service::start_draining`] was called.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Completes when no request of any session runs. New ones may still start; see [`Service::start_draining`].
    pub async fn idle(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// The open connections, which the socket layer counts; none may be open before [`Shares::set`].
    pub fn connections(&self) -> &Arc<Shares> {
        &self.connections
    }

    /// A number for a new connection.
    pub(super) fn new_connection(&self) -> u64 {
        self.numbered.fetch_add(1, Ordering::Relaxed)
    }

    /// Refuses new work while the daemon drains.
    pub(super) fn refuse_while_draining(&self) -> Result<(), Failure> {
        if self.is_draining() {
            return Err(failure(
                ErrorCode::ServerDraining,
                "the daemon is stopping: try again after it has restarted",
            ));
        }
        Ok(())
    }

    /// Number of lines about that uid that were left out since the last one; `None` if the next one is left out too.
    /// Call before a line that a client can cause at will.
    pub fn may_log(&self, uid: u32) -> Option<u64> {
        self.logged.lock().tell(uid, Instant::now()).map(|untold| untold.of_uid)
    }

    /// Counts a request for tokens, a load to a device or a subscription against its uid.
    ///
    /// # Errors
    /// `Quota` if the uid holds as many tickets as it may.
    pub(super) fn ticket(self: &Arc<Self>, uid: u32) -> Result<Ticket, Failure> {
        let limit = self.users().of(uid).requests;
        let mut active = self.active.lock();
        let count = active.per_uid.get(&uid).copied().unwrap_or(0);
        if count >= limit.value {
            let end = if count > 0 { ": wait for some to end" } else { "" };
            let text =
                format!("uid {uid} has {count} requests, queued and running; {}{end}", limit.words(uid));
            return Err(failure(ErrorCode::Quota, &text)
                .with_detail("own", count)
                .with_detail("limit", limit.value));
        }
        active.per_uid.insert(uid, count + 1);
        active.askers = active.askers.and(uid);
        drop(active);
        Ok(Ticket { service: Arc::clone(self), uid, sequence: None })
    }

    /// True if all requests that ever held a ticket were that user's: the daemon's counters then tell nothing of others.
    pub(super) fn is_alone(&self, uid: u32) -> bool {
        self.active.lock().askers.and(uid) == Askers::One(uid)
    }

    /// Waits up to [`RENDERING_WAIT`] for the uid's turn to render a chat template. Templates may take long, so users
    /// whose allowance of [`TextTime`] is used up wait in a queue of their own.
    pub(super) async fn rendering_turn(&self, uid: u32, bytes: usize) -> Result<Turn, Failure> {
        let turn = async {
            if self.text_time.may_claim(uid, bytes) {
                let turn = self.rendering.take(uid).await;
                // The uid's templates before this one may have used the allowance up.
                if self.text_time.may_claim(uid, bytes) {
                    return turn;
                }
            }
            self.rendering_later.take(uid).await
        };
        tokio::time::timeout(RENDERING_WAIT, turn).await.map_err(|_| {
            let text = format!(
                "the daemon renders {RENDERING_MAX} chat templates at once, {RENDERING_MAX_OF_UID} of a uid, and \
                 {RENDERING_LATER_MAX} of users whose texts took much time; none ended within {} s: try again later",
                RENDERING_WAIT.as_secs()
            );
            failure(ErrorCode::Busy, &text)
        })
    }

    /// The token requests with their uids.
    pub(super) fn sequences(&self) -> Vec<(SequenceId, u32)> {
        self.active.lock().sequences.iter().map(|(id, asked)| (*id, asked.uid)).collect()
    }

    /// Cancels a token request at whatever stage it is. Ignores one that has ended.
    pub(super) fn cancel(&self, id: SequenceId) {
        let stopped = self.active.lock().sequences.get(&id).map(|asked| asked.stopped.clone());
        if let Some(stopped) = stopped {
            stopped.cancel();
        }
        // At once: the request's task may wait for its client.
        self.engine.cancel(id);
    }

    /// Numbers of token requests by user.
    pub(super) fn sequences_by_user(&self) -> Vec<(u32, u64)> {
        let mut counts: HashMap<u32, u64> = HashMap::new();
        for asked in self.active.lock().sequences.values() {
            *counts.entry(asked.uid).or_default() += 1;
        }
        counts.into_iter().collect()
    }

    /// Numbers of a user's token requests, by the model names that it used.
    pub(super) fn sequences_of(&self, uid: u32) -> BTreeMap<String, u32> {
        let mut counts = BTreeMap::new();
        for asked in self.active.lock().sequences.values().filter(|asked| asked.uid == uid) {
            *counts.entry(asked.model.clone()).or_default() += 1;
        }
        counts
    }

    /// The token requests that the engine does not have yet, and for which `wanted` holds.
    pub(super) fn preparing(&self, wanted: impl Fn(SequenceId, u32) -> bool) -> Vec<Preparing> {
        let active = self.active.lock();
        let of = |(id, asked): (&SequenceId, &Asked)| {
            let Asked { uid, arrived, .. } = *asked;
            Preparing { id: *id, uid, model: asked.model.clone(), arrived }
        };
        let all = active.sequences.iter().filter(|(id, asked)| asked.preparing && wanted(**id, asked.uid));
        all.map(of).collect()
    }

    /// The model name that each of these sequences was asked for with; empty once it has ended.
    pub(super) fn model_names(&self, ids: impl Iterator<Item = SequenceId>) -> Vec<String> {
        let active = self.active.lock();
        let name = |id| active.sequences.get(&id).map_or_else(String::new, |asked| asked.model.clone());
        ids.map(name).collect()
    }
}

impl Ticket {
    /// Records the sequence that the request is to become. The token is cancelled when another request cancels it.
    pub(super) fn becomes(&mut self, id: SequenceId, model: &str, arrived: Instant) -> CancellationToken {
        self.sequence = Some(id);
        let stopped = CancellationToken::new();
        let (model, token) = (model.to_owned(), stopped.clone());
        let asked = Asked { uid: self.uid, model, arrived, preparing: true, stopped: token };
        self.service.active.lock().sequences.insert(id, asked);
        stopped
    }

    /// Call when the engine has the sequence.
    pub(super) fn submitted(&self) {
        let mut active = self.service.active.lock();
        if let Some(asked) = self.sequence.and_then(|id| active.sequences.get_mut(&id)) {
            asked.preparing = false;
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut active = self.service.active.lock();
        if let Some(id) = self.sequence {
            active.sequences.remove(&id);
        }
        if let Some(count) = active.per_uid.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                active.per_uid.remove(&self.uid);
            }
        }
    }
}

/// A random number: the standard library seeds its hashers from the operating system.
pub(super) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// The 16 bytes of a UUID's text; zeros if the text is not a UUID.
fn uuid_bytes(text: &str) -> [u8; 16] {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    u128::from_str_radix(&digits, 16).map_or([0; 16], u128::to_be_bytes)
}
