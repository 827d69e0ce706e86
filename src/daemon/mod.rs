//! Assembles the daemon: configuration, engine, models, sessions, socket; and its life with the service manager.
//!
//! Above all layers. [`Daemon`] is the running whole without signals and notices, so that a test can start one in its
//! own process with its own backend. [`run`] is what `rocmforged` does.
//!
//! A daemon's life: `Starting` (engine, models, socket) -> `Serving` (READY=1) -> `Draining` (new work is refused,
//! running answers finish or end with an error in time) -> ended.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::backend::{Backend, BackendError};
use crate::config::{self, Config, ConfigError, Origins};
use crate::model::Model;
use crate::model::store::{OpenError, Store};
use crate::model::tokenizer::Tokenizers;
use crate::prefixes::PrefixStore;
use crate::scheduler::{Engine, EngineError, EngineHandle, EngineOptions, PrefixKeeper};
use crate::session::{ModelEvents, OutlivesRestart, Service, Settings};
use crate::share::limits::UserLimits;
use crate::share::privileged_uids;
use crate::socket::{Acceptor, Endpoint, ListenError};

pub mod allocator;
pub mod arguments;
pub mod device;
pub mod directories;
pub mod inherited;
mod journal;
mod keep;
pub mod kept;
mod lifecycle;
pub mod logging;
mod nameless;
pub mod policy;
mod pressure;
mod trim;
mod watchdog;
mod weights;

use inherited::Inherited;
use keep::Keep;
use kept::{Kept, Rest};
pub use lifecycle::{Start, run};

/// After the drain: time for connections to read their last answers, and for the engine to end its last step.
const LAST_WORDS: Duration = Duration::from_millis(1500);
/// After that: time to read kept prefixes from the device, and as much to write the rest of them.
const KEEPING: Duration = Duration::from_secs(4);

/// Longest time that a start waits until passed models are mapped again.
const RESTORING: Duration = Duration::from_secs(5);

/// Longest time that the other releases wait for the engine's part.
const BETWEEN_STEPS: Duration = Duration::from_millis(500);

/// Why the daemon did not start or did not stop cleanly.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The configuration is not usable.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No usable socket.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// No usable device.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The operating system refused another operation.
    #[error("{what}: {source}")]
    Os {
        /// The operation.
        what: &'static str,
        /// The operating system's error.
        #[source]
        source: std::io::Error,
    },
    /// Prefixes are to be kept, and no folder is named.
    #[error(
        "kv.keep_mib needs a folder: set kv.keep_dir, or start under systemd, which names the service's cache directory"
    )]
    NoKeepDir,
    /// The folder of kept prefixes cannot be used.
    #[error("{} cannot keep prefixes: {source}; set kv.keep_dir to a folder that the daemon may write, or kv.keep_mib to 0", dir.display())]
    KeepDir {
        /// The folder.
        dir: PathBuf,
        /// The operating system's error.
        #[source]
        source: std::io::Error,
    },
    /// The engine lost its device while the daemon served.
    #[error("the engine lost its device and could not open it again (the log says why): restart the daemon")]
    EngineFailed,
    /// The engine did not end its step when the daemon stopped.
    #[error("the engine did not stop within {} ms: a step hangs", LAST_WORDS.as_millis())]
    EngineHangs,
}

impl DaemonError {
    /// Exit status (sysexits): 78 for the configuration and its folders, 69 for the socket, 71 for the rest. 70 for an
    /// engine that hangs or lost its device.
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Config(_) | Self::NoKeepDir | Self::KeepDir { .. } => 78,
            Self::Listen(_) => 69,
            Self::EngineFailed | Self::EngineHangs => 70,
            Self::Engine(_) | Self::Os { .. } => 71,
        }
    }

    /// Whether another start fails too, until a person mends the configuration.
    pub fn is_for_a_person(&self) -> bool {
        matches!(self, Self::Config(_) | Self::NoKeepDir | Self::KeepDir { .. })
    }
}

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    service: Arc<Service>,
    store: Arc<Store>,
    acceptor: Arc<Acceptor>,
    engine: Engine,
    endpoint: Arc<Endpoint>,
    accepting: JoinHandle<()>,
    /// Cancelled to accept no more connections.
    stop_accepting: CancellationToken,
    /// Cancelled to read no more frames on open connections.
    close: CancellationToken,
    drain: Duration,
    /// Sends changes to the task that loads weights as configured.
    weights: tokio::sync::mpsc::Sender<weights::Changes>,
    prefixes: Option<Arc<PrefixStore>>,
    keep: Option<Keep>,
    /// Releases idle memory when memory is short.
    _pressure: Option<pressure::Watch>,
    _trimmer: Option<trim::Trimmer>,
}

impl Daemon {
    /// Starts everything; the daemon answers clients when this returns. Must be called inside a runtime.
    ///
    /// `listener` is a socket passed by systemd; without it, `config.socket` is bound.
    ///
    /// # Errors
    /// [`DaemonError`].
    pub async fn start<F>(config: &Config, listener: Option<OwnedFd>, factory: F) -> Result<Self, DaemonError>
    where
        F: Fn() -> Result<Box<dyn Backend>, BackendError> + Send + 'static,
    {
        Self::start_from(config, Inherited { listener, ..Inherited::default() }, factory).await
    }

    /// As [`Daemon::start`], with all descriptors that systemd passed.
    ///
    /// # Errors
    /// [`DaemonError`].
    pub async fn start_from<F>(config: &Config, inherited: Inherited, factory: F) -> Result<Self, DaemonError>
    where
        F: Fn() -> Result<Box<dyn Backend>, BackendError> + Send + 'static,
    {
        let Inherited { listener, kept: handed, unknown } = inherited;
        kept::drop_unknown(&unknown);
        config.check()?;
        let policy = policy::resolve(&config.policy)?;
        let users: Arc<UserLimits> = Arc::default();
        users.configure(config.limits.of_every_user(), policy::limited_users(&config.limits)?);
        let endpoint = Arc::new(match listener {
            Some(fd) => Endpoint::from_systemd(fd)?,
            None => Endpoint::bind(&config.socket)?,
        });
        let keep = Keep::of(config)?;
        let prefixes = match &keep {
            Some(keep) => keep.prefixes(config.kv.reuse).await?,
            None => None,
        };
        let keeper = prefixes.clone().map(|store| store as Arc<dyn PrefixKeeper>);
        let engine = Engine::start(EngineOptions { keeper, ..engine_options(config, &users) }, factory)?;
        let events = ModelEvents::default();
        let store = store(config, &engine.handle(), &events, &users);
        let scan = Arc::clone(&store);
        let os = |what| move |e: tokio::task::JoinError| DaemonError::Os { what, source: e.into() };
        tokio::task::spawn_blocking(move || scan.rescan()).await.map_err(os("looking for models"))?;

        // Not the executable's path: an upgrade may have put another program there, and answers must not depend on
        // that.
        let program = PathBuf::from("/proc/self/exe");
        let settings = Settings {
            context_tokens: config.limits.context_tokens,
            users,
            request_bytes: config.limits.request_mib << 20,
            descriptors: descriptors_in_requests(),
            program,
        };
        let service = Service::new(Arc::clone(&store), engine.handle(), settings, events);
        store.set_host_policy(config.host_policy());
        service.set_policy(policy);
        service.set_draft_models(weights::draft_models(&config.weights.models));
        prefixes.iter().for_each(|store| service.keep_prefixes(Arc::clone(store)));
        if let Some(keep) = &keep {
            keep.restore_sessions(&service).await;
        }
        let rest = keep_over_restarts(&service, &engine.handle(), handed).await;
        let _pressure = watch_pressure(&service, &store, &engine.handle());
        let _trimmer = trim::Trimmer::start()
            .inspect_err(|error| tracing::warn!("freed memory may stay with the daemon: no thread: {error}"))
            .ok();
        let acceptor = Acceptor::new(Arc::clone(&service), connections(config));
        let (stop_accepting, close) = (CancellationToken::new(), CancellationToken::new());
        let accept = Arc::clone(&acceptor).run(Arc::clone(&endpoint), stop_accepting.clone(), close.clone());
        let accepting = tokio::spawn(accept);
        drop(tokio::spawn(nameless::look_after(Arc::downgrade(&service))));
        // Runs in the background while clients are answered.
        map_wanted(Arc::clone(&store));
        let wanted = weights::changes(&Default::default(), &config.weights.models);
        let weights =
            weights::start(Arc::clone(&store), engine.handle(), wanted, bring(rest, engine.handle()));
        Ok(Self {
            _pressure,
            _trimmer,
            service,
            store,
            acceptor,
            engine,
            endpoint,
            accepting,
            stop_accepting,
            close,
            drain: config.drain(),
            weights,
            prefixes,
            keep,
        })
    }

    /// Applies the settings that can change at run time: model directories, residency in memory and on a device, the
    /// policy, and the limit of connections. `old` is the configuration in force.
    pub async fn reload(&self, old: &Config, config: &Config) {
        self.acceptor.set_total(connections(config));
        self.store.allow_remote_files(config.limits.passed_remote_files);
        match policy::resolve(&config.policy) {
            Ok(policy) => self.service.set_policy(policy),
            Err(error) => tracing::error!(%error, "the new policy is not valid: the one in force stays"),
        }
        self.store.set_directories(config.models.clone());
        let (store, policy) = (Arc::clone(&self.store), config.host_policy());
        let look = move || {
            store.rescan();
            store.set_host_policy(policy);
            store
        };
        match tokio::task::spawn_blocking(look).await {
            Ok(store) => map_wanted(store),
            Err(_) => tracing::error!("looking for models failed"),
        }
        self.service.set_draft_models(weights::draft_models(&config.weights.models));
        // Sent even without changes: a model that was missing may exist now. The task lives as long as this daemon.
        let _ = self.weights.send(weights::changes(&old.weights.models, &config.weights.models)).await;
    }

    /// Applies the limits of users; those that requests set are dropped.
    pub fn limit_users(&self, config: &Config) {
        match policy::limited_users(&config.limits) {
            Ok(limited) => self.service.users().configure(config.limits.of_every_user(), limited),
            Err(error) => tracing::error!(%error, "the new limits are not valid: those in force stay"),
        }
    }

    /// Stops: refuses new work, lets running answers finish for `limits.drain_s`, then ends them with a typed error.
    /// Sends finished output, then closes.
    ///
    /// # Errors
    /// [`DaemonError::EngineHangs`]; everything else has ended then too.
    pub async fn stop(self) -> Result<(), DaemonError> {
        self.service.start_draining();
        if self.endpoint.is_handed_over() {
            // New clients wait for the next daemon. On the daemon's own socket, a refusal says more than a hang-up.
            self.stop_accepting.cancel();
        }
        let handle = self.engine.handle();
        handle.drain(Instant::now() + self.drain);
        let finished = async {
            handle.drained().await;
            self.service.idle().await;
        };
        if tokio::time::timeout(self.drain + LAST_WORDS, finished).await.is_err() {
            tracing::warn!("some requests did not end in time");
        }
        self.stop_accepting.cancel();
        self.close.cancel();
        let ended = async {
            let _ = self.accepting.await;
            self.acceptor.closed().await;
        };
        let _ = tokio::time::timeout(LAST_WORDS, ended).await;
        if let Some(keep) = self.keep {
            keep.write_sessions(&self.service).await;
        }
        // Removed here and not by the last owner, which may be a task that never runs again when the process ends.
        self.endpoint.unlink();
        let engine = self.engine;
        let stopped = tokio::task::spawn_blocking(move || engine.stop());
        let keeping = if self.prefixes.is_some() { KEEPING } else { Duration::ZERO };
        tokio::time::timeout(LAST_WORDS + keeping, stopped)
            .await
            .map_err(|_| DaemonError::EngineHangs)?
            .map_err(|source| DaemonError::Os { what: "stopping the engine", source: source.into() })?;
        if let Some(prefixes) = self.prefixes {
            let written = tokio::task::spawn_blocking(move || prefixes.finish());
            if tokio::time::timeout(keeping, written).await.is_err() {
                tracing::warn!(
                    "not all prefixes were kept within {} s: the rest is computed again",
                    KEEPING.as_secs()
                );
            }
        }
        Ok(())
    }

    /// Counters that increase while the daemon is healthy: the accept loop's and the engine's.
    fn pulses(&self) -> Pulses {
        Pulses {
            acceptor: Arc::clone(&self.acceptor),
            engine: self.engine.handle(),
            service: Arc::clone(&self.service),
        }
    }
}

/// Handles that the watchdog reads.
struct Pulses {
    acceptor: Arc<Acceptor>,
    engine: EngineHandle,
    service: Arc<Service>,
}

fn engine_options(config: &Config, users: &Arc<UserLimits>) -> EngineOptions {
    EngineOptions {
        rows_max: match config.limits.step_rows as usize {
            0 => None,
            rows => Some(rows.max(config.limits.running as usize)),
        },
        sequences_max: Some(config.limits.running as usize).filter(|&running| running > 0),
        queue_max: config.limits.queued as usize,
        kv_budget_bytes: config.kv_budget_bytes(),
        kv_percent_per_user: config.kv.percent_per_uid,
        reuse: config.kv.reuse,
        swap_bytes: config.kv.swap_mib << 20,
        privileged: privileged_uids().to_vec(),
        users: Arc::clone(users),
        ..EngineOptions::default()
    }
}

/// Takes over the descriptors that an earlier process stored, so that passed models answer from the start. Returns the
/// remaining work, to do once clients are answered. After [`RESTORING`] the restore goes on in the background.
async fn keep_over_restarts(
    service: &Arc<Service>,
    engine: &EngineHandle,
    handed: kept::Handed,
) -> Option<(Arc<Kept>, JoinHandle<Rest>)> {
    let kept = Arc::new(Kept::new(service.store(), engine.clone())?);
    service.keep(Arc::clone(&kept) as Arc<dyn OutlivesRestart>);
    let restoring = Arc::clone(&kept);
    let mut rest = tokio::task::spawn_blocking(move || kept::restore(&restoring, handed));
    match tokio::time::timeout(RESTORING, &mut rest).await {
        Ok(Ok(done)) => rest = tokio::spawn(async { done }),
        Ok(Err(_)) => return None,
        Err(_) => tracing::warn!("passed models are still being mapped; the daemon serves clients meanwhile"),
    }
    Some((kept, rest))
}

/// Restores the rules and locks from before a restart; returns the models that have restored rules.
async fn bring(rest: Option<(Arc<Kept>, JoinHandle<Rest>)>, engine: EngineHandle) -> BTreeSet<String> {
    let Some((kept, rest)) = rest else { return BTreeSet::new() };
    let Ok(rest) = rest.await else { return BTreeSet::new() };
    let ruled = rest.ruled();
    rest.bring(kept, engine).await;
    ruled
}

/// Maps the models that the configuration keeps in memory, on a thread of its own.
fn map_wanted(store: Arc<Store>) {
    drop(tokio::task::spawn_blocking(move || store.map_wanted()));
}

/// Releases to run when memory is short, in this order. Running work needs none of this memory.
fn releases(store: &Arc<Store>, engine: &EngineHandle) -> Vec<pressure::Release> {
    let store = Arc::clone(store);
    let pages = move || format!("pages of {} idle models", store.give_idle_pages_back());
    let (runtime, engine) = (tokio::runtime::Handle::current(), engine.clone());
    let device = move || {
        let (done, cleared) = mpsc::sync_channel(1);
        let engine = engine.clone();
        runtime.spawn(async move { done.send(engine.release_idle().await) });
        // The engine does it between two steps, perhaps after this wait.
        match cleared.recv_timeout(BETWEEN_STEPS) {
            Ok(Ok(cleared)) => format!("{} bytes of device memory", cleared.bytes),
            Ok(Err(error)) => format!("no device memory ({error})"),
            Err(_) => "device memory after the running step".to_owned(),
        }
    };
    let heap = || {
        allocator::trim();
        "free pages of the heap".to_owned()
    };
    vec![Box::new(pages), Box::new(device), Box::new(heap)]
}

fn watch_pressure(
    service: &Arc<Service>,
    store: &Arc<Store>,
    engine: &EngineHandle,
) -> Option<pressure::Watch> {
    let source = match pressure::source() {
        Ok(source) => source,
        Err(error) => {
            tracing::info!("memory pressure is not watched: {error}");
            return None;
        }
    };
    let (path, told) = (source.path().display().to_string(), Arc::clone(service));
    match pressure::Watch::start(source, move || told.pressure.count(), releases(store, engine)) {
        Ok(watch) => {
            tracing::info!(path, "memory pressure is watched");
            service.pressure.watched(path);
            Some(watch)
        }
        Err(error) => {
            tracing::warn!(%error, "memory pressure is not watched");
            None
        }
    }
}

/// The configured connections, but at most half of this process's descriptors. With more, connections that are held would take the last
/// one, and then nobody could connect, root neither.
fn connections(config: &Config) -> u32 {
    let (wanted, most) = (config.limits.connections, descriptors() / 2);
    let possible = u32::try_from(most).unwrap_or(u32::MAX).clamp(1, wanted.max(1));
    if possible < wanted {
        tracing::warn!(
            wanted,
            possible,
            "limits.connections is lowered to half of the descriptors that this process may have: raise LimitNOFILE (ulimit -n) for more"
        );
    }
    possible
}

/// A quarter of this process's descriptors: clients pass them with requests that may wait.
fn descriptors_in_requests() -> u64 {
    descriptors() / 4
}

/// An eighth of this process's descriptors: passed files hold theirs until they are unloaded.
fn descriptors_of_passed() -> u64 {
    descriptors() / 8
}

/// The descriptors that this process may have.
fn descriptors() -> u64 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.unwrap_or(u64::from(u32::MAX))
}

fn store(
    config: &Config,
    engine: &EngineHandle,
    events: &ModelEvents,
    users: &Arc<UserLimits>,
) -> Arc<Store> {
    let check = engine.clone();
    let tokenizers = Tokenizers::default();
    let open = move |id, name: &str, files, charge| {
        let model = Model::open_beside(id, name, files, &tokenizers, charge)?;
        check.check_model(&model)?;
        Ok::<_, OpenError>(model)
    };
    let engine = engine.clone();
    let events = events.clone();
    let on_gone = move |id| {
        engine.model_gone(id);
        events.unmapped(id);
    };
    let store = Store::new(config.models.clone(), Arc::clone(users), Box::new(open), Box::new(on_gone));
    store.headers().set(config.limits.header_mib << 20);
    store.passed_descriptors().set(descriptors_of_passed());
    store.allow_remote_files(config.limits.passed_remote_files);
    store
}

/// Source of the configuration: a file with its drop-ins, and the command-line options that override it.
#[derive(Clone, Debug, Default)]
pub struct ConfigSource {
    /// The configuration file.
    pub file: Option<PathBuf>,
    /// `--socket`.
    pub socket: Option<PathBuf>,
    /// `--models`; replaces the file's directories.
    pub models: Vec<PathBuf>,
}

impl ConfigSource {
    /// Reads and checks the whole configuration.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn load(&self) -> Result<(Config, Origins), ConfigError> {
        self.read(true)
    }

    /// As [`ConfigSource::load`], for a daemon that serves and for a check: an empty file is refused.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn reload(&self) -> Result<(Config, Origins), ConfigError> {
        self.read(false)
    }

    fn read(&self, may_be_empty: bool) -> Result<(Config, Origins), ConfigError> {
        let file = self.file.as_deref().map(|file| config::read(file, may_be_empty));
        let (mut config, mut origins) = file.unwrap_or_else(|| Ok(Default::default()))?;
        if let Some(socket) = &self.socket {
            config.socket.clone_from(socket);
            origins.forget("socket");
        }
        if !self.models.is_empty() {
            config.models.clone_from(&self.models);
            origins.forget("models");
        }
        let checked = config.check().and_then(|()| {
            policy::resolve(&config.policy)?;
            policy::limited_users(&config.limits)
        });
        checked.map_err(|error| origins.name(error))?;
        Ok((config, origins))
    }
}
