//! Files that outlive the daemon: known prefixes and sessions, in one folder.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::DaemonError;
use crate::config::Config;
use crate::prefixes::{PrefixStore, make_dir, sessions};
use crate::scheduler::Reuse;
use crate::session::Service;

/// Longest time that the daemon writes sessions before it ends.
const WRITING: Duration = Duration::from_secs(4);

/// The folder of kept files, and their bound in bytes.
#[derive(Debug)]
pub(super) struct Keep {
    dir: PathBuf,
    bytes_max: u64,
}

impl Keep {
    /// `None` if the configuration keeps nothing.
    ///
    /// # Errors
    /// [`DaemonError::NoKeepDir`].
    pub fn of(config: &Config) -> Result<Option<Self>, DaemonError> {
        if config.kv.keep_mib == 0 {
            return Ok(None);
        }
        let of_service = || std::env::var_os("CACHE_DIRECTORY").map(|dir| Path::new(&dir).join("prefixes"));
        let named = Some(config.kv.keep_dir.clone()).filter(|dir| !dir.as_os_str().is_empty());
        let dir = named.or_else(of_service).ok_or(DaemonError::NoKeepDir)?;
        Ok(Some(Self { dir, bytes_max: config.kv.keep_mib << 20 }))
    }

    /// The files of kept prefixes; `None` if requests reuse none.
    ///
    /// # Errors
    /// [`DaemonError::KeepDir`].
    pub async fn prefixes(&self, reuse: Reuse) -> Result<Option<Arc<PrefixStore>>, DaemonError> {
        if reuse == Reuse::Off {
            return Ok(None);
        }
        let (dir, bytes_max) = (self.dir.clone(), self.bytes_max);
        let open = move || {
            PrefixStore::open(&dir, bytes_max, reuse).map_err(|source| DaemonError::KeepDir { dir, source })
        };
        let opened = tokio::task::spawn_blocking(open).await;
        let store = opened
            .map_err(|source| DaemonError::Os { what: "reading kept prefixes", source: source.into() })??;
        let (files, bytes) = store.sums();
        tracing::info!(files, bytes, "prefixes of an earlier run are kept");
        Ok(Some(store))
    }

    /// Takes the sessions of an earlier daemon back.
    pub async fn restore_sessions(&self, service: &Arc<Service>) {
        let (dir, service) = (self.dir.clone(), Arc::clone(service));
        let restore = move || {
            let Some(sessions) = sessions::take(&dir) else { return };
            let (kept, taken) = (sessions.len(), service.restore_sessions(sessions));
            tracing::info!(kept, taken, "sessions of an earlier run go on");
        };
        if tokio::task::spawn_blocking(restore).await.is_err() {
            tracing::error!("reading kept sessions panicked: they are lost");
        }
    }

    /// Writes the sessions; waits at most [`WRITING`].
    pub async fn write_sessions(self, service: &Arc<Service>) {
        let service = Arc::clone(service);
        let write = move || {
            let sessions = service.sessions_to_keep(self.bytes_max);
            let written = make_dir(&self.dir).and_then(|()| sessions::write(&self.dir, sessions.iter()));
            if let Err(error) = written {
                tracing::warn!(dir = %self.dir.display(), %error, "sessions could not be kept: they are lost");
            }
        };
        if tokio::time::timeout(WRITING, tokio::task::spawn_blocking(write)).await.is_err() {
            tracing::warn!("sessions were not kept within {} s: they are lost", WRITING.as_secs());
        }
    }
}
