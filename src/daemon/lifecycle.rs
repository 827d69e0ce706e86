//! The run of `rocmforged` from start to end: signals, notices to the service manager, reloads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook_tokio::Signals;

use super::inherited::Inherited;
use super::{ConfigSource, Daemon, DaemonError, directories, watchdog};
use crate::aside::{ReceivedFd, STUCK};
use crate::backend::{Backend, BackendError};
use crate::config::{Config, ConfigError};
use crate::session;

/// Exit status when a second signal ends the process at once.
const CUT_SHORT: i32 = 130;

/// Time at the end for descriptors to close.
const CLOSING_TIME: Duration = Duration::from_millis(100);

/// Runtime threads. They only move frames; the engine's own threads compute models.
const RUNTIME_THREADS: usize = 2;

/// Threads for blocking work: one for each request that may block, and some for the daemon's own reload and stop.
const BLOCKING_THREADS: usize = session::BLOCKING_MAX + 4;

/// Inputs to start a daemon.
#[derive(Debug)]
pub struct Start {
    /// Configuration in force.
    pub config: Config,
    /// Source to read again at SIGHUP.
    pub source: ConfigSource,
    /// Descriptors from systemd.
    pub inherited: Inherited,
}

/// Serves until SIGTERM or SIGINT, then drains. SIGHUP reads the configuration again and looks for models. A second
/// SIGTERM or SIGINT ends the process at once with status 130. Also ends when the engine has lost its device for good.
///
/// # Errors
/// [`DaemonError`]; [`DaemonError::EngineFailed`] after the engine lost its device.
pub fn run<F>(start: Start, factory: F) -> Result<(), DaemonError>
where
    F: Fn() -> Result<Box<dyn Backend>, BackendError> + Send + 'static,
{
    let os = |what| move |source| DaemonError::Os { what, source };
    let watchdog = sd_notify::watchdog_enabled();
    let stopping = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // Registered in the handler itself, so that it works even if everything else hangs.
        signal_hook::flag::register_conditional_shutdown(signal, CUT_SHORT, Arc::clone(&stopping))
            .map_err(os("signals"))?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(RUNTIME_THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_name("io")
        .enable_all()
        .build()
        .map_err(os("runtime"))?;
    let result = runtime.block_on(async {
        let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(os("signals"))?;
        let Start { mut config, source, inherited } = start;
        let daemon = Daemon::start_from(&config, inherited, factory).await?;
        if let Some(period) = watchdog {
            tokio::spawn(watchdog::feed(period, daemon.pulses()));
        }
        let status = status(&daemon, &config);
        notify(&[NotifyState::Ready, NotifyState::Status(&status)]);
        let engine = daemon.engine.handle();
        let failed = loop {
            tokio::select! {
                () = engine.failed() => break true,
                signal = signals.next() => match signal {
                    Some(SIGHUP) => reload(&daemon, &source, &mut config).await,
                    _ => break false,
                },
            }
        };
        if failed {
            // The service manager can start the daemon again; a daemon that refuses all requests is useless.
            tracing::error!("the engine has ended: no request can be answered, so the daemon stops");
        }
        stopping.store(true, Ordering::Release);
        tracing::info!(name: "stopping", drain_s = config.limits.drain_s, "stopping: running answers finish first");
        notify(&[NotifyState::Stopping, NotifyState::Status("stopping: running answers finish first")]);
        daemon.stop().await?;
        tracing::info!("stopped");
        let closing = still_closing().await;
        if closing > 0 {
            tracing::warn!(closing, "descriptors that clients passed do not close: {STUCK}");
        }
        if failed { Err(DaemonError::EngineFailed) } else { Ok(()) }
    });
    // Blocking work still running cannot delay the end.
    runtime.shutdown_background();
    result
}

/// Descriptors that clients passed and that do not close. Local ones close within microseconds, so they have [`CLOSING_TIME`].
async fn still_closing() -> usize {
    let until = Instant::now() + CLOSING_TIME;
    loop {
        match ReceivedFd::closing() {
            closing if closing == 0 || Instant::now() >= until => return closing,
            _ => tokio::time::sleep(CLOSING_TIME / 10).await,
        }
    }
}

async fn reload(daemon: &Daemon, source: &ConfigSource, config: &mut Config) {
    // systemd waits for READY=1 after this; from version 253 on it needs the time with it.
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => tracing::warn!(%error, "reading the monotonic clock for the service manager failed"),
    }
    let new = match source.reload() {
        Ok((new, origins)) => match worth(daemon, config, &new).await {
            Ok(warnings) => {
                warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
                Ok((new, origins))
            }
            Err(error) => Err(origins.name(error)),
        },
        Err(error) => Err(error),
    };
    match new {
        Ok((new, origins)) => {
            if needs_restart(config, &new) {
                tracing::warn!(
                    "some changed settings take effect at the next start: a reload changes only models, [host], [weights], [policy] and the limits of connections and of users"
                );
            }
            daemon.limit_users(&new);
            let before = daemon.store.names();
            daemon.reload(config, &new).await;
            if before > 0 && daemon.store.names() == 0 {
                tracing::warn!(
                    dropped = before,
                    directories = ?new.models,
                    "this reload drops all {before} models: no directory of the configuration has any"
                );
            }
            config.models = new.models;
            config.limits = new.limits;
            config.host = new.host;
            config.policy = new.policy;
            config.weights = new.weights;
            tracing::info!(name: "reloaded", files = %origins, "configuration read again");
        }
        Err(error) => {
            tracing::error!(%error, "the configuration is not valid: the one in force stays");
            daemon.reload(config, config).await;
        }
    }
    let status = status(daemon, config);
    notify(&[NotifyState::Ready, NotifyState::Status(&status)]);
}

/// The models that a new configuration would not serve. Directories that are in force already may have become worthless: they are no
/// reason to refuse other changes.
async fn worth(daemon: &Daemon, old: &Config, new: &Config) -> Result<Vec<String>, ConfigError> {
    let engine = daemon.engine.handle();
    let (old, new) = (old.models.clone(), new.clone());
    let look = move || {
        directories::check_new(&old, &new.models)?;
        let refuses = move |program: &_| engine.check_program(program).err();
        let survey = directories::survey(&new.models, directories::RELOAD_PATIENCE, Box::new(refuses));
        match directories::judge(&new, survey.as_ref()) {
            Err(error) if new.models == old => Ok(vec![error.to_string()]),
            judged => judged,
        }
    };
    // Without an answer, the configuration is at least readable.
    tokio::task::spawn_blocking(look).await.unwrap_or_else(|_| Ok(Vec::new()))
}

/// True if a changed setting takes effect only at a start.
fn needs_restart(old: &Config, new: &Config) -> bool {
    let mut comparable = new.clone();
    comparable.models.clone_from(&old.models);
    comparable.host.clone_from(&old.host);
    comparable.policy.clone_from(&old.policy);
    comparable.weights.clone_from(&old.weights);
    comparable.limits.connections = old.limits.connections;
    comparable.limits.connections_per_uid = old.limits.connections_per_uid;
    comparable.limits.requests_per_uid = old.limits.requests_per_uid;
    comparable.limits.passed_models_per_uid = old.limits.passed_models_per_uid;
    comparable.limits.users.clone_from(&old.limits.users);
    comparable.limits.passed_remote_files = old.limits.passed_remote_files;
    comparable != *old
}

fn status(daemon: &Daemon, config: &Config) -> String {
    let names = daemon.store.names();
    let text = format!("serving {names} models from {} directories", config.models.len());
    tracing::info!(name: "serving", socket = %config.socket.display(), handed_over = daemon.endpoint.is_handed_over(), "{text}");
    text
}

/// An unreachable service manager does not stop the daemon.
fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "notifying the service manager failed");
    }
}
