//! Keeps a model's file pages in the machine's memory, and reports the progress.
//!
//! States of a model's pages: `AsTheyCome` (the kernel loads and evicts them) -> `Coming` (read ahead piece by piece)
//! -> `Here` (all read). A wanted lock covers them from the first piece on. `Refused` and `Failed` hold the reason; the
//! model is served all the same. The store's [`Keeper`](super::store) works piece by piece; the wanted residency may
//! change in between.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Deserialize;

use super::files::ModelFiles;
use crate::lock::{Mutex, Rank};
use crate::tensor::MapError;

/// Bytes loaded between two checks of the wanted residency: 64 ms for a disk of 1 GB/s.
const PIECE_BYTES: u64 = 64 << 20;

/// Wanted residency of a mapped model in the machine's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PageResidency {
    /// Left to the kernel: it loads pages on access and evicts them when memory is short.
    #[default]
    None,
    /// The whole model is read ahead once; the kernel may evict it.
    Populate,
    /// The whole model is read ahead and locked.
    Lock,
}

/// The configured residency of models' files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPolicy {
    /// Default for all models. A file passed by a client is at most populated by this, not locked.
    pub residency: PageResidency,
    /// Residency of models in directories, by name.
    pub models: BTreeMap<String, PageResidency>,
    /// Most locked bytes of all models together.
    pub lock_bytes_max: u64,
}

impl Default for HostPolicy {
    fn default() -> Self {
        Self { residency: PageResidency::None, models: BTreeMap::new(), lock_bytes_max: u64::MAX }
    }
}

/// Why a model is not locked. The model is served without the lock.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Above the kernel's limit, `RLIMIT_MEMLOCK`.
    #[error(
        "locking {need} bytes beside the {locked} of other models exceeds RLIMIT_MEMLOCK, {limit} bytes: set \
         LimitMEMLOCK=infinity in the unit (systemctl edit rocmforged), or ulimit -l"
    )]
    Rlimit {
        /// Bytes of the model.
        need: u64,
        /// Bytes locked for other models.
        locked: u64,
        /// `RLIMIT_MEMLOCK`.
        limit: u64,
    },
    /// Above the configured limit, `host.lock_mib`.
    #[error(
        "locking {need} bytes beside the {locked} of other models exceeds host.lock_mib of the configuration, {limit} \
         bytes: raise it, or unpin another model"
    )]
    Configured {
        /// Bytes of the model.
        need: u64,
        /// Bytes locked for other models.
        locked: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// Another error of the operating system.
    #[error("{need} bytes cannot be locked: {error}")]
    Os {
        /// Bytes of the model.
        need: u64,
        /// Message of the operating system.
        error: String,
    },
}

/// State of a model's pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PagesState {
    /// The kernel loads and evicts them.
    #[default]
    AsTheyCome,
    /// They are being read ahead.
    Coming,
    /// All were read, and are locked if wanted.
    Here,
    /// They were freed because memory was short.
    GivenBack,
    /// The lock was refused.
    Refused(Refusal),
    /// Reading the file failed.
    Failed(String),
}

/// The current state of a model's pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PagesReport {
    /// Wanted residency.
    pub wanted: PageResidency,
    /// Progress or result.
    pub state: PagesState,
    /// True when the pages are locked, including pages not yet read.
    pub locked: bool,
    /// Bytes read ahead so far.
    pub read_bytes: u64,
}

/// The wanted and actual residency of a model's pages.
#[derive(Debug)]
pub struct Pages {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    wanted: PageResidency,
    state: PagesState,
    lock: Option<Locked>,
    read_bytes: u64,
}

/// Bytes counted as locked in the budget until this drops.
#[derive(Debug)]
struct Locked {
    bytes: u64,
    budget: Arc<LockBudget>,
}

/// The limit and the sum of locked bytes of all models.
#[derive(Debug)]
pub struct LockBudget {
    max_bytes: AtomicU64,
    bytes: AtomicU64,
}

/// Remaining work after a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// More pieces follow.
    More,
    /// Nothing until the wanted residency changes.
    Rest,
}

impl LockBudget {
    /// An empty budget of `max_bytes`.
    pub fn new(max_bytes: u64) -> Arc<Self> {
        Arc::new(Self { max_bytes: AtomicU64::new(max_bytes), bytes: AtomicU64::new(0) })
    }

    /// Changes the limit for later locks; existing locks stay.
    pub fn set_max(&self, max_bytes: u64) {
        self.max_bytes.store(max_bytes, Ordering::Relaxed);
    }

    /// The limit in bytes.
    pub fn max_bytes(&self) -> u64 {
        self.max_bytes.load(Ordering::Relaxed)
    }

    /// Locked bytes, including pages not yet read.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn take(self: &Arc<Self>, need: u64) -> Result<Locked, Refusal> {
        let limit = self.max_bytes();
        let fits = |locked: u64| locked.checked_add(need).filter(|sum| *sum <= limit);
        self.bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .map(|_| Locked { bytes: need, budget: Arc::clone(self) })
            .map_err(|locked| Refusal::Configured { need, locked, limit })
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        self.budget.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Default for Pages {
    fn default() -> Self {
        Self { inner: Mutex::new(Rank::ModelPages, Inner::default()) }
    }
}

impl Pages {
    /// A snapshot of the state.
    pub fn report(&self) -> PagesReport {
        let inner = self.inner.lock();
        PagesReport {
            wanted: inner.wanted,
            state: inner.state.clone(),
            locked: inner.lock.is_some(),
            read_bytes: inner.read_bytes,
        }
    }

    /// True when a lock is wanted: the pages must not be freed.
    pub fn wants_lock(&self) -> bool {
        let inner = self.inner.lock();
        inner.wanted == PageResidency::Lock && !matches!(inner.state, PagesState::Refused(_))
    }

    /// Sets the wanted residency. Returns true when [`Pages::step`] has work. Repeating a refused or failed request
    /// retries it.
    pub(super) fn want(&self, wanted: PageResidency) -> bool {
        let mut inner = self.inner.lock();
        let again =
            matches!(inner.state, PagesState::Refused(_) | PagesState::Failed(_) | PagesState::GivenBack)
                && wanted != PageResidency::None;
        if inner.wanted == wanted && !again {
            return false;
        }
        // From the start: the kernel may have evicted earlier pages.
        (inner.wanted, inner.state, inner.read_bytes) = (wanted, PagesState::Coming, 0);
        true
    }

    /// As [`Pages::want`], but only raises the wanted residency.
    pub(super) fn want_at_least(&self, wanted: PageResidency) -> bool {
        let less = self.inner.lock().wanted < wanted;
        less && self.want(wanted)
    }

    /// Processes the next piece. Blocks while the disk is read.
    pub(super) fn step(&self, files: &ModelFiles, budget: &Arc<LockBudget>) -> Next {
        let (wanted, from) = {
            let inner = self.inner.lock();
            (inner.wanted, inner.read_bytes)
        };
        if wanted != PageResidency::Lock {
            self.unlock(files);
        }
        if wanted == PageResidency::None {
            let mut inner = self.inner.lock();
            if inner.wanted == PageResidency::None {
                (inner.read_bytes, inner.state) = (0, PagesState::AsTheyCome);
            }
            return Next::Rest;
        }
        if wanted == PageResidency::Lock && !self.is_locked() {
            match lock(files, budget) {
                Ok(locked) => self.inner.lock().lock = Some(locked),
                Err(refusal) => return self.end(wanted, PagesState::Refused(refusal)),
            }
        }
        match populate(files, from) {
            Ok(read) => {
                let mut inner = self.inner.lock();
                if inner.read_bytes == from {
                    inner.read_bytes = from + read;
                }
                drop(inner);
                if read > 0 { Next::More } else { self.end(wanted, PagesState::Here) }
            }
            Err(error) => {
                self.unlock(files);
                self.end(wanted, PagesState::Failed(error.to_string()))
            }
        }
    }

    /// Frees all pages of a model that is not to be locked.
    ///
    /// # Errors
    /// As [`MappedFile::give_pages_back`](crate::tensor::MappedFile::give_pages_back).
    pub(super) fn give_back(&self, files: &ModelFiles) -> Result<(), MapError> {
        if self.wants_lock() {
            return Ok(());
        }
        files.mappings().try_for_each(|file| file.give_pages_back())?;
        let mut inner = self.inner.lock();
        if matches!(inner.state, PagesState::Here | PagesState::Coming) {
            // Stop reading ahead: pages read now would be freed again.
            (inner.read_bytes, inner.state) = (files.bytes(), PagesState::GivenBack);
        }
        Ok(())
    }

    fn is_locked(&self) -> bool {
        self.inner.lock().lock.is_some()
    }

    fn unlock(&self, files: &ModelFiles) {
        // Counted in the budget until the kernel has unlocked the pages.
        let Some(_locked) = self.inner.lock().lock.take() else { return };
        unlock(files);
    }

    /// Ends the work with `state`, unless the wanted residency changed meanwhile.
    fn end(&self, wanted: PageResidency, state: PagesState) -> Next {
        let mut inner = self.inner.lock();
        if inner.wanted != wanted {
            return Next::More;
        }
        if inner.state == PagesState::Coming {
            inner.state = state;
        }
        Next::Rest
    }
}

/// Locks all files or none.
fn lock(files: &ModelFiles, budget: &Arc<LockBudget>) -> Result<Locked, Refusal> {
    let need = files.bytes();
    let locked = budget.take(need)?;
    let tried = files.mappings().try_for_each(|file| file.lock_pages());
    tried.map(|()| locked).map_err(|error| {
        unlock(files);
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        let others = budget.bytes().saturating_sub(need);
        match limit {
            Some(limit) if others.saturating_add(need) > limit => {
                Refusal::Rlimit { need, locked: others, limit }
            }
            _ => Refusal::Os { need, error: error.to_string() },
        }
    })
}

fn unlock(files: &ModelFiles) {
    for file in files.mappings() {
        if let Err(error) = file.unlock_pages() {
            tracing::warn!(%error, "cannot unlock a model's pages; they stay locked until it is unmapped");
        }
    }
}

/// Loads the next piece after the first `done` bytes of all files. Returns its size in bytes.
fn populate(files: &ModelFiles, done: u64) -> Result<u64, MapError> {
    let mut before = 0u64;
    for file in files.mappings() {
        let piece = |from: u64| from.min(file.len())..from.saturating_add(PIECE_BYTES).min(file.len());
        let here: Range<u64> = piece(done.saturating_sub(before));
        if !here.is_empty() {
            file.check_unchanged()?;
            file.populate(here.clone(), piece(here.end))?;
            return Ok(here.end - here.start);
        }
        before = before.saturating_add(file.len());
    }
    Ok(0)
}
