//! Which models there are: names, files, and one mapping per file identity.
//!
//! Names come from the model directories, for everyone, and from files that clients passed by descriptor, each for the
//! uid that passed it alone: whoever can rewrite such a file can only harm himself. A uid's own name goes before a
//! directory's. Whoever names a file, the same file (device, inode, size, times) is mapped once. Parts of a split model
//! (`NAME-00001-of-00003.gguf`) that lie in one directory are one model with one name and as many mappings.
//!
//! A mapping's life: `Opening` (one opener, the others wait) -> `Ready` -> `Retired` (unloaded, replaced or poisoned;
//! its requests finish) -> gone. What no name leads to and no request uses is gone in any state. A failed opening leaves
//! nothing behind: every waiter gets the error, the next request tries again.
//!
//! Calls block (they open and stat files, and wait for an opener): not for runtime threads. One lock, `tables`, held for
//! look-ups only; nothing is opened or unmapped and no callback runs under it.

use std::collections::HashMap;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::{Model, ModelError, ModelId};
use crate::backend::BackendError;
use crate::lock::{Condvar, Guard, Mutex, Rank};
use crate::tensor::{FileIdentity, MapError, MappedFile, is_shortage};

mod directory;
mod keeper;
mod names;
mod parts;
mod residency;
mod tables;
#[cfg(test)]
mod tests;

use directory::Looks;
use keeper::Keeper;
pub use names::Passed;
use tables::{Gone, InTables, Opened, Slot, SlotState, Tables};
pub use tables::{Listing, ModelStatus};

/// Most names from directories.
pub const NAMES_MAX: usize = 4096;

/// Longest name of a model.
pub const NAME_BYTES_MAX: usize = 255;

/// Why a model cannot be had.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// No such name for this uid.
    #[error("no model is named {name:?}; `list` shows the names")]
    NotFound {
        /// The name.
        name: String,
    },
    /// A name that no file can have.
    #[error("{name:?} cannot be a model's name: 1 to {NAME_BYTES_MAX} bytes, no control characters")]
    BadName {
        /// The name.
        name: String,
    },
    /// The file is there and cannot be a model.
    #[error("{name}: {reason}")]
    Unusable {
        /// The name.
        name: String,
        /// Why.
        reason: String,
    },
    /// The file is no regular file, or not opened as it has to be.
    #[error("{name}: {source}")]
    File {
        /// The name.
        name: String,
        /// What is wrong with it.
        source: Arc<MapError>,
    },
    /// The file is damaged or of a kind that is not supported.
    #[error("{name}: {source}")]
    Open {
        /// The name.
        name: String,
        /// Why.
        source: Arc<OpenError>,
    },
    /// A passed file was changed in place since.
    #[error("{name}: the file changed since it was passed: load it again")]
    Changed {
        /// The name.
        name: String,
    },
    /// A passed file lost bytes while it was mapped.
    #[error(
        "{name}: the file lost bytes while it was mapped (truncated, or a disk error): load it again once it is whole"
    )]
    Poisoned {
        /// The name.
        name: String,
    },
    /// Only who loaded it, or an administrator, may unload it or change what it has of a device.
    #[error("{name} was loaded by another user: only that user or an administrator may do that")]
    NotYours {
        /// The name.
        name: String,
    },
    /// Memory is locked for administrators only, and for who the policy names.
    #[error(
        "{name} stays unlocked: administrators (root, the daemon's own user), and who policy.lock names, lock models in memory"
    )]
    NotAdministrator {
        /// The name.
        name: String,
    },
    /// Too many files passed by one uid.
    #[error("{limit} files passed by descriptor are loaded already: unload one first")]
    Quota {
        /// The limit.
        limit: usize,
    },
}

impl StoreError {
    /// True when nothing is wrong with the model: the daemon is short of descriptors or memory.
    pub fn is_shortage(&self) -> bool {
        match self {
            Self::File { source, .. } => source.is_shortage(),
            Self::Open { source, .. } => match &**source {
                OpenError::Model(error) => error.is_shortage(),
                OpenError::Backend(_) | OpenError::Panicked(_) => false,
            },
            _ => false,
        }
    }
}

/// Why a file did not open as a model that can run here.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// No device computes with one of its tensor types.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A bug of ours.
    #[error("internal error while the file was read: {0}")]
    Panicked(String),
}

/// Makes a model of its files: [`Model::open`], and whether a device can run it.
pub type Opener = dyn Fn(ModelId, &str, Vec<File>) -> Result<Model, OpenError> + Send + Sync;

/// What makes open files the same model: the identity of each, in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Identity(Arc<[FileIdentity]>);

impl Identity {
    /// Refuses files that cannot be mapped.
    fn of(name: &str, files: &[File]) -> Result<Self, StoreError> {
        let each: Result<_, _> = files.iter().map(MappedFile::inspect).collect();
        Ok(Self(each.map_err(|source| file_error(name, source))?))
    }

    /// Size of all files.
    fn bytes(&self) -> u64 {
        self.0.iter().map(|file| file.size).fold(0, u64::saturating_add)
    }
}

/// Called, under no lock, when a mapping is gone: devices let go of what they hold for it.
pub type OnGone = dyn Fn(ModelId) + Send + Sync;

/// All models.
pub struct Store {
    tables: Mutex<Tables>,
    /// Told at the end of each opening.
    opened: Condvar,
    /// The last finished look into the directories; held while one runs.
    scan: Mutex<Scan>,
    scans_started: AtomicU64,
    next_id: AtomicU64,
    passed_per_uid_max: usize,
    open: Box<Opener>,
    on_gone: Box<OnGone>,
    keeper: Arc<Keeper>,
}

/// Looks into the directories.
#[derive(Default)]
struct Scan {
    /// How many have finished.
    finished: u64,
    looks: Looks,
}

/// A mapped model in use by one request. The mapping stays until the last one drops.
pub struct Lease {
    store: Arc<Store>,
    model: Arc<Model>,
}

impl Lease {
    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let gone = self.store.tables.lock().release(self.model.id);
        self.store.tell(gone);
    }
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Lease").field(&self.model.id).finish()
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").finish_non_exhaustive()
    }
}

/// What an unload did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unloaded {
    /// It was mapped, or about to be: a request was opening it.
    pub was_mapped: bool,
    /// Requests that its end waits for, those that wait for its opening among them; 0 where another name keeps it.
    pub in_use: u32,
}

/// Where a name leads.
enum Source {
    Passed(ModelId),
    Directory(directory::Entry),
}

impl Source {
    /// Parts were missing when it was last looked for.
    fn is_incomplete(&self) -> bool {
        matches!(self, Self::Directory(entry) if entry.incomplete)
    }
}

impl Store {
    /// A store of `directories`; call [`Store::rescan`] to look into them.
    pub fn new(
        directories: Vec<PathBuf>,
        passed_per_uid_max: usize,
        open: Box<Opener>,
        on_gone: Box<OnGone>,
    ) -> Arc<Self> {
        Arc::new(Self {
            tables: Mutex::new(Rank::StoreTables, Tables::new(directories)),
            opened: Condvar::new(),
            scan: Mutex::new(Rank::StoreScan, Scan::default()),
            scans_started: AtomicU64::new(0),
            next_id: AtomicU64::new(1),
            passed_per_uid_max,
            open,
            on_gone,
            keeper: Keeper::new(),
        })
    }

    /// Replaces the model directories; models stay as they are.
    pub fn set_directories(&self, directories: Vec<PathBuf>) {
        self.tables.lock().directories = directories;
    }

    /// Looks into the directories. Callers that come while one looks share the next look: a storm of misses costs two.
    pub fn rescan(&self) {
        let wanted = self.scans_started.load(Ordering::SeqCst) + 1;
        let mut scan = self.scan.lock();
        if scan.finished >= wanted {
            return;
        }
        let number = self.scans_started.fetch_add(1, Ordering::SeqCst) + 1;
        let directories = self.tables.lock().directories.clone();
        let entries = scan.looks.look(&directories);
        let gone = self.tables.lock().replace_entries(entries);
        scan.finished = number;
        drop(scan);
        self.tell(gone);
    }

    /// The model of that name, mapped if it was not; true when this call mapped it.
    ///
    /// Its file is looked at anew: a replaced file is mapped as a new model, requests that run finish on the old one.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn acquire(self: &Arc<Self>, uid: u32, name: &str) -> Result<(Lease, bool), StoreError> {
        let mut source = self.tables.lock().resolve(uid, name);
        if source.as_ref().is_none_or(Source::is_incomplete) {
            self.rescan();
            source = self.tables.lock().resolve(uid, name);
        }
        match source {
            None => Err(StoreError::NotFound { name: name.into() }),
            Some(Source::Passed(id)) => Ok((self.acquire_passed(name, id)?, false)),
            Some(Source::Directory(entry)) => self.acquire_entry(uid, name, &entry),
        }
        .inspect(|(lease, _)| self.keep_pages(uid, name, lease.model()))
    }

    /// Maps a file that a client passed, and gives it a name for that uid; true when it was not mapped before.
    ///
    /// # Errors
    /// [`StoreError::File`] when it is no regular file opened for reading only; [`StoreError::Open`].
    pub fn pass(self: &Arc<Self>, uid: u32, name: &str, file: File) -> Result<(Lease, bool), StoreError> {
        if !directory::is_name(name) {
            return Err(StoreError::BadName { name: name.into() });
        }
        let limit = self.passed_per_uid_max;
        let full = || StoreError::Quota { limit };
        if !self.tables.lock().may_pass(uid, name, limit) {
            return Err(full());
        }
        let files = vec![file];
        let identity = Identity::of(name, &files)?;
        let (lease, mapped_now) = self.lease(uid, name, files, &identity)?;
        let mut tables = self.tables.lock();
        if !tables.may_pass(uid, name, limit) {
            drop(tables);
            return Err(full());
        }
        let gone = tables.set_passed(uid, name, lease.model.id);
        drop(tables);
        self.tell(gone);
        self.keep_pages(uid, name, lease.model());
        Ok((lease, mapped_now))
    }

    /// Lets a model go: a passed one loses its name, the mapping goes when nothing uses it. A directory's name stays, and
    /// the next request for it maps it again; so do all names that directories have for the same file. A file that was
    /// passed under another name, or has a directory's name besides the passed one, stays mapped for that.
    ///
    /// # Errors
    /// [`StoreError::NotFound`], [`StoreError::NotYours`].
    pub fn unload(&self, uid: u32, administrator: bool, name: &str) -> Result<Unloaded, StoreError> {
        let mut tables = self.tables.lock();
        let (unloaded, gone) = tables.unload(uid, administrator, name, self.passed_per_uid_max)?;
        tables.unpin(uid, name);
        drop(tables);
        self.tell(gone);
        self.settle_pages();
        Ok(unloaded)
    }

    /// All names this uid can ask for, in order.
    pub fn list(&self, uid: u32) -> Vec<Listing> {
        self.rescan();
        let all = self.tables.lock().list(uid);
        all.into_iter().map(InTables::look_at_file).collect()
    }

    /// One name, as [`Store::list`] has it. Looks into no directory.
    pub fn status(&self, uid: u32, name: &str) -> Option<Listing> {
        let found = self.tables.lock().listing(uid, name);
        found.map(InTables::look_at_file)
    }

    /// Names that everyone knows.
    pub fn names(&self) -> usize {
        self.tables.lock().names()
    }

    /// Mapped models.
    pub fn mapped(&self) -> usize {
        self.tables.lock().mapped()
    }

    /// For each name whether every uid knows a model by it, in one look-up.
    pub fn are_public<'a>(&self, names: impl Iterator<Item = &'a str>) -> Vec<bool> {
        let tables = self.tables.lock();
        names.map(|name| tables.is_public(name)).collect()
    }

    /// What each of these models is called, as far as that uid may know: its own name for it, else a directory's; for an
    /// administrator also one that another uid gave it.
    pub fn names_of(&self, uid: u32, administrator: bool, ids: &[ModelId]) -> HashMap<ModelId, String> {
        self.tables.lock().names_of(uid, administrator, ids)
    }

    /// The mapped model of that name, for who may unload it; `None` while it is not mapped.
    ///
    /// # Errors
    /// As [`Store::unload`].
    pub fn owned(&self, uid: u32, administrator: bool, name: &str) -> Result<Option<Arc<Model>>, StoreError> {
        self.tables.lock().owned(uid, administrator, name)
    }

    fn acquire_passed(self: &Arc<Self>, name: &str, id: ModelId) -> Result<Lease, StoreError> {
        let not_found = || StoreError::NotFound { name: name.into() };
        let model = self.tables.lock().ready(id).ok_or_else(not_found)?;
        match model.files.check_poison().and_then(|()| model.files.check_unchanged()) {
            Ok(()) => {}
            Err(MapError::Poisoned) => return Err(StoreError::Poisoned { name: name.into() }),
            Err(_) => return Err(StoreError::Changed { name: name.into() }),
        }
        let used = self.tables.lock().revive_and_use(id);
        used.then(|| Lease { store: Arc::clone(self), model }).ok_or_else(not_found)
    }

    fn acquire_entry(
        self: &Arc<Self>,
        uid: u32,
        name: &str,
        entry: &directory::Entry,
    ) -> Result<(Lease, bool), StoreError> {
        let unusable = |reason: String| Err(StoreError::Unusable { name: name.into(), reason });
        if let (true, Some(reason)) = (entry.incomplete, &entry.unusable) {
            return unusable(reason.clone());
        }
        let files = match entry.open() {
            Ok(files) => files,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                self.rescan();
                // Of a split model some may still be there.
                let found = self.tables.lock().resolve(uid, name);
                return match found {
                    Some(Source::Directory(entry)) if entry.incomplete => {
                        unusable(entry.unusable.unwrap_or_default())
                    }
                    _ => Err(StoreError::NotFound { name: name.into() }),
                };
            }
            Err(source) if is_shortage(&source) => {
                return Err(file_error(name, MapError::Os { what: "open", source }));
            }
            Err(error) => return unusable(error.to_string()),
        };
        let identity = Identity::of(name, &files)?;
        let gone = self.tables.lock().seen(name, &identity);
        self.tell(gone);
        let result = self.lease(uid, name, files, &identity);
        // A shortage is ours: the file may be well.
        let failure = result.as_ref().err();
        if !failure.is_some_and(StoreError::is_shortage) {
            self.tables.lock().note_failure(name, &identity, failure);
        }
        result
    }

    /// A lease on the mapping of those files: the one there is, or a new one.
    fn lease(
        self: &Arc<Self>,
        uid: u32,
        name: &str,
        files: Vec<File>,
        identity: &Identity,
    ) -> Result<(Lease, bool), StoreError> {
        let mut tables = self.tables.lock();
        let id = loop {
            match tables.current(identity) {
                None => break ModelId(self.next_id.fetch_add(1, Ordering::Relaxed)),
                Some((id, SlotState::Ready(model))) if model.files.check_poison().is_err() => {
                    let gone = tables.retire(id);
                    drop(tables);
                    self.tell(gone);
                    drop(model); // before the lock: it may be the last to hold the mapping
                    tables = self.tables.lock();
                }
                Some((id, SlotState::Ready(model))) => {
                    tables.revive_and_use(id);
                    return Ok((Lease { store: Arc::clone(self), model }, false));
                }
                Some((id, SlotState::Opening(flight))) => {
                    tables.revive_and_use(id);
                    let model = self
                        .wait(tables, &flight)
                        .map_err(|source| StoreError::Open { name: name.into(), source })?;
                    return Ok((Lease { store: Arc::clone(self), model }, false));
                }
            }
        };
        let flight: Arc<Opened> = Arc::new(OnceLock::new());
        tables.insert(id, Slot::opening(identity.clone(), uid, Arc::clone(&flight)));
        drop(tables);

        let result = self.open_caught(id, name, files).map(Arc::new).map_err(Arc::new);
        let mut tables = self.tables.lock();
        match &result {
            Ok(model) => tables.opened(id, model),
            Err(_) => tables.failed(id),
        }
        let _ = flight.set(result.clone());
        drop(tables);
        self.opened.notify_all();
        match result {
            Ok(model) => Ok((Lease { store: Arc::clone(self), model }, true)),
            Err(source) => Err(StoreError::Open { name: name.into(), source }),
        }
    }

    /// What the opening came to. Who waits is counted as a user already.
    fn wait(&self, mut tables: Guard<'_, Tables>, flight: &Opened) -> Result<Arc<Model>, Arc<OpenError>> {
        loop {
            if let Some(result) = flight.get() {
                return result.clone();
            }
            self.opened.wait(&mut tables);
        }
    }

    fn open_caught(&self, id: ModelId, name: &str, files: Vec<File>) -> Result<Model, OpenError> {
        catch_unwind(AssertUnwindSafe(|| (self.open)(id, name, files)))
            .unwrap_or_else(|panic| Err(OpenError::Panicked(panic_text(&*panic))))
    }

    /// Called without the lock: dropping `gone` unmaps.
    fn tell(&self, gone: Gone) {
        self.let_retired_pages_go();
        for (id, _slot) in &gone {
            (self.on_gone)(*id);
        }
    }
}

fn file_error(name: &str, source: MapError) -> StoreError {
    StoreError::File { name: name.into(), source: Arc::new(source) }
}

/// What a panic said.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").to_owned()
}
