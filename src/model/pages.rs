//! What of a model's files is kept in the machine's memory: what is wanted, and how far that is.
//!
//! A model's pages: `AsTheyCome` (the kernel brings and takes them) -> `Coming` (read ahead piece by piece) -> `Here`, all
//! of them; locked from the first piece on where that is wanted. `Refused` and `Failed` say why not; the model is served all
//! the same. The work is done by the store's [`Keeper`](super::store), a piece at a time; what is wanted may change in between.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Deserialize;

use super::files::ModelFiles;
use crate::lock::{Mutex, Rank};
use crate::tensor::MapError;

/// Bytes brought between two looks at what is wanted: at 1 GB/s of a disk, 64 ms.
const PIECE_BYTES: u64 = 64 << 20;

/// What is to be kept of a mapped model in the machine's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Residency {
    /// What the kernel keeps: pages come when they are read and go when memory is short.
    #[default]
    None,
    /// All of it is read ahead once; the kernel may take it back.
    Populate,
    /// All of it is read ahead and locked.
    Lock,
}

/// What the configuration wants of models' files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPolicy {
    /// Of models in general. A file that a client passed is not locked by this, only populated.
    pub residency: Residency,
    /// Of those in directories that have one of these names.
    pub models: BTreeMap<String, Residency>,
    /// Most bytes to lock for all models together.
    pub lock_bytes_max: u64,
}

impl Default for HostPolicy {
    fn default() -> Self {
        Self { residency: Residency::None, models: BTreeMap::new(), lock_bytes_max: u64::MAX }
    }
}

/// Why a model is not locked. It is served from pages that come and go.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The kernel's limit.
    #[error(
        "locking {need} bytes beside the {locked} of other models passes RLIMIT_MEMLOCK, {limit} bytes: set \
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
    /// The configuration's.
    #[error(
        "locking {need} bytes beside the {locked} of other models passes host.lock_mib of the configuration, {limit} \
         bytes: set it higher, or unpin another model"
    )]
    Configured {
        /// Bytes of the model.
        need: u64,
        /// Bytes locked for other models.
        locked: u64,
        /// The bound.
        limit: u64,
    },
    /// Something else.
    #[error("{need} bytes cannot be locked: {error}")]
    Os {
        /// Bytes of the model.
        need: u64,
        /// What the operating system says.
        error: String,
    },
}

/// Where a model's pages are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PagesState {
    /// The kernel brings and takes them.
    #[default]
    AsTheyCome,
    /// They are being read.
    Coming,
    /// All were read, and are locked if that was wanted.
    Here,
    /// They were, until memory was short.
    GivenBack,
    /// They may not be locked.
    Refused(Refusal),
    /// The file could not be read.
    Failed(String),
}

/// A model's pages as they are now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagesReport {
    /// What is wanted.
    pub wanted: Residency,
    /// How that went.
    pub state: PagesState,
    /// They are locked, those among them that are still to come.
    pub locked: bool,
    /// Bytes read ahead so far.
    pub read_bytes: u64,
}

/// What of a model is kept in memory.
#[derive(Debug)]
pub struct Pages {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    wanted: Residency,
    state: PagesState,
    lock: Option<Locked>,
    read_bytes: u64,
}

/// Bytes counted as locked, until it drops.
#[derive(Debug)]
struct Locked {
    bytes: u64,
    budget: Arc<LockBudget>,
}

/// How many bytes may be locked for all models together, and are.
#[derive(Debug)]
pub struct LockBudget {
    max_bytes: AtomicU64,
    bytes: AtomicU64,
}

/// What is left to do after a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// More pieces.
    More,
    /// Nothing, until something else is wanted.
    Rest,
}

impl LockBudget {
    /// None of at most `max_bytes`.
    pub fn new(max_bytes: u64) -> Arc<Self> {
        Arc::new(Self { max_bytes: AtomicU64::new(max_bytes), bytes: AtomicU64::new(0) })
    }

    /// Another bound for what is locked from now on.
    pub fn set_max(&self, max_bytes: u64) {
        self.max_bytes.store(max_bytes, Ordering::Relaxed);
    }

    /// The bound.
    pub fn max_bytes(&self) -> u64 {
        self.max_bytes.load(Ordering::Relaxed)
    }

    /// Bytes locked, counted with what is still to come.
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
    /// How things are.
    pub fn report(&self) -> PagesReport {
        let inner = self.inner.lock();
        PagesReport {
            wanted: inner.wanted,
            state: inner.state.clone(),
            locked: inner.lock.is_some(),
            read_bytes: inner.read_bytes,
        }
    }

    /// True where pages must not be given back, now or soon.
    pub fn wants_lock(&self) -> bool {
        let inner = self.inner.lock();
        inner.wanted == Residency::Lock && !matches!(inner.state, PagesState::Refused(_))
    }

    /// From now on this is wanted; true when that is news, and [`Pages::step`] has something to do. Asking again for what was
    /// refused or failed tries it again.
    pub(super) fn want(&self, wanted: Residency) -> bool {
        let mut inner = self.inner.lock();
        let again =
            matches!(inner.state, PagesState::Refused(_) | PagesState::Failed(_) | PagesState::GivenBack)
                && wanted != Residency::None;
        if inner.wanted == wanted && !again {
            return false;
        }
        // From the start: what came before may have gone again.
        (inner.wanted, inner.state, inner.read_bytes) = (wanted, PagesState::Coming, 0);
        true
    }

    /// As [`Pages::want`], where less was wanted until now.
    pub(super) fn want_at_least(&self, wanted: Residency) -> bool {
        let less = self.inner.lock().wanted < wanted;
        less && self.want(wanted)
    }

    /// Does the next piece of what is wanted. Blocks while the disk is read.
    pub(super) fn step(&self, files: &ModelFiles, budget: &Arc<LockBudget>) -> Next {
        let (wanted, from) = {
            let inner = self.inner.lock();
            (inner.wanted, inner.read_bytes)
        };
        if wanted != Residency::Lock {
            self.unlock(files);
        }
        if wanted == Residency::None {
            let mut inner = self.inner.lock();
            if inner.wanted == Residency::None {
                (inner.read_bytes, inner.state) = (0, PagesState::AsTheyCome);
            }
            return Next::Rest;
        }
        if wanted == Residency::Lock && !self.is_locked() {
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

    /// Lets go of all pages of a model that is not to be locked.
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
            // What still comes would go again.
            (inner.read_bytes, inner.state) = (files.bytes(), PagesState::GivenBack);
        }
        Ok(())
    }

    fn is_locked(&self) -> bool {
        self.inner.lock().lock.is_some()
    }

    fn unlock(&self, files: &ModelFiles) {
        // Counted until the kernel has let go.
        let Some(_locked) = self.inner.lock().lock.take() else { return };
        unlock(files);
    }

    /// Unless something else is wanted by now.
    fn end(&self, wanted: Residency, state: PagesState) -> Next {
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

/// All files or none.
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
            tracing::warn!(%error, "a model's pages stay locked until it is unmapped");
        }
    }
}

/// Brings the next piece after the first `done` bytes of all files; how many bytes it has.
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
