//! The model store: names, files, and one mapping per file identity.
//!
//! Names come from the model directories, for everyone, and from files that clients pass by descriptor. A passed file
//! belongs to the passing uid alone, so a client that rewrites its file harms only itself. A uid's own name precedes a
//! directory's. A file is mapped once per identity (device, inode, size, times), whatever its names. Parts of a split
//! model (`NAME-00001-of-00003.gguf`) in one directory form one model with one name and one mapping per part.
//!
//! States of a mapping: `Opening` (one opener, the others wait) -> `Ready` -> `Retired` (unloaded, replaced or
//! poisoned; its requests finish) -> gone. A mapping without a name and without a request is removed in any state. A
//! failed opening leaves nothing behind: every waiter gets the error, and the next request tries again.
//!
//! Calls block: they open and stat files, and wait for an opener. Do not call them on runtime threads. One lock,
//! `tables`, guards look-ups only; no file is opened or unmapped and no callback runs under it.

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
mod pages;
mod shards;
mod tables;
#[cfg(test)]
mod tests;

use directory::Looks;
use keeper::Keeper;
pub use names::Passed;
use tables::{Gone, InTables, Opened, Slot, SlotState, Tables};
pub use tables::{Listing, ModelStatus};

/// Most names from all directories.
pub const NAMES_MAX: usize = 4096;

/// Longest name of a model, in bytes.
pub const NAME_BYTES_MAX: usize = 255;

/// Why a request for a model failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// This uid has no model of that name.
    #[error("no model is named {name:?}; `list` shows the names")]
    NotFound {
        /// Requested name.
        name: String,
    },
    /// The name is not a valid model name.
    #[error("{name:?} cannot be a model's name: 1 to {NAME_BYTES_MAX} bytes, no control characters")]
    BadName {
        /// Requested name.
        name: String,
    },
    /// The file exists but cannot be a model.
    #[error("{name}: {reason}")]
    Unusable {
        /// Requested name.
        name: String,
        /// The reason, as shown to the user.
        reason: String,
    },
    /// The file is not a regular file opened for reading only.
    #[error("{name}: {source}")]
    File {
        /// Requested name.
        name: String,
        /// The fault of the file.
        source: Arc<MapError>,
    },
    /// The file is damaged or of an unsupported kind.
    #[error("{name}: {source}")]
    Open {
        /// Requested name.
        name: String,
        /// The error of the opening.
        source: Arc<OpenError>,
    },
    /// A passed file changed in place after it was passed.
    #[error("{name}: the file changed since it was passed: load it again")]
    Changed {
        /// Requested name.
        name: String,
    },
    /// A passed file lost bytes while it was mapped.
    #[error(
        "{name}: the file lost bytes while it was mapped (truncated, or a disk error): load it again once it is whole"
    )]
    Poisoned {
        /// Requested name.
        name: String,
    },
    /// Only the uid that loaded the model, or an administrator, may unload it or change its device memory.
    #[error("{name} was loaded by another user: only that user or an administrator may do that")]
    NotYours {
        /// Requested name.
        name: String,
    },
    /// Only administrators, and users that the policy names, may lock memory.
    #[error(
        "{name} stays unlocked: only administrators (root, the daemon's user) and users in policy.lock may lock memory"
    )]
    NotAdministrator {
        /// Requested name.
        name: String,
    },
    /// Too many files passed by one uid.
    #[error("{limit} files passed by descriptor are loaded already: unload one first")]
    Quota {
        /// Most passed files per uid.
        limit: usize,
    },
}

impl StoreError {
    /// True when the daemon is short of descriptors or memory and the model itself may be sound.
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

/// Why a file did not open as a model that this machine can run.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file is not a valid or supported model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// No device computes with one of its tensor types.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The opener panicked: a bug in the daemon.
    #[error("internal error while the file was read: {0}")]
    Panicked(String),
}

/// Builds a model from its files: [`Model::open`], plus a check that a device can run it.
pub type Opener = dyn Fn(ModelId, &str, Vec<File>) -> Result<Model, OpenError> + Send + Sync;

/// Identity of a model: the identity of each open file, in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Identity(Arc<[FileIdentity]>);

impl Identity {
    /// Refuses files that cannot be mapped.
    fn of(name: &str, files: &[File]) -> Result<Self, StoreError> {
        let each: Result<_, _> = files.iter().map(MappedFile::inspect).collect();
        Ok(Self(each.map_err(|source| file_error(name, source))?))
    }

    /// Total size of all files.
    fn bytes(&self) -> u64 {
        self.0.iter().map(|file| file.size).fold(0, u64::saturating_add)
    }
}

/// Called without the lock when a mapping is gone: devices free what they hold for it.
pub type OnGone = dyn Fn(ModelId) + Send + Sync;

/// All models known to the daemon.
pub struct Store {
    tables: Mutex<Tables>,
    /// Notified at the end of each opening.
    opened: Condvar,
    /// The last finished scan of the directories; locked during a scan.
    scan: Mutex<Scan>,
    scans_started: AtomicU64,
    next_id: AtomicU64,
    passed_per_uid_max: usize,
    open: Box<Opener>,
    on_gone: Box<OnGone>,
    keeper: Arc<Keeper>,
}

/// Scans of the directories.
#[derive(Default)]
struct Scan {
    /// Number of finished scans.
    finished: u64,
    looks: Looks,
}

/// A mapped model in use by one request. The mapping stays until the last lease drops.
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

/// Result of an unload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unloaded {
    /// True when the model was mapped, or a request was opening it.
    pub was_mapped: bool,
    /// Requests that the unmapping waits for, including waiters for the opening; 0 where another name keeps the
    /// mapping.
    pub in_use: u32,
}

/// The file source behind a name.
enum Source {
    Passed(ModelId),
    Directory(directory::Entry),
}

impl Source {
    /// True when the last scan found missing parts.
    fn is_incomplete(&self) -> bool {
        matches!(self, Self::Directory(entry) if entry.incomplete)
    }
}

impl Store {
    /// A store of `directories`; call [`Store::rescan`] to scan them.
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

    /// Replaces the model directories. The known models stay until the next scan.
    pub fn set_directories(&self, directories: Vec<PathBuf>) {
        self.tables.lock().directories = directories;
    }

    /// Scans the directories. Callers that arrive during a scan share the next one: any number of misses costs two
    /// scans.
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

    /// Returns the model of that name and maps it if needed; true when this call mapped it.
    ///
    /// Checks its file again: a replaced file is mapped as a new model, and running requests finish on the old one.
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

    /// Maps a file passed by a client and gives it a name for that uid; true when it was not mapped before.
    ///
    /// # Errors
    /// [`StoreError::File`] when it is not a regular file opened for reading only; [`StoreError::Open`].
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

    /// Unloads a model. A passed model loses its name; the mapping is removed when nothing uses it. A directory's name
    /// stays, as do all directory names of the same file; the next request maps the file again. A file that also has
    /// another passed name, or a directory's name besides the passed one, stays mapped for that name.
    ///
    /// # Errors
    /// [`StoreError::NotFound`], [`StoreError::NotYours`].
    pub fn unload(&self, uid: u32, administrator: bool, name: &str) -> Result<Unloaded, StoreError> {
        let mut tables = self.tables.lock();
        let (unloaded, gone) = tables.unload(uid, administrator, name, self.passed_per_uid_max)?;
        tables.unpin(uid, name);
        drop(tables);
        self.tell(gone);
        self.want_pages();
        Ok(unloaded)
    }

    /// All names that this uid can request, in order.
    pub fn list(&self, uid: u32) -> Vec<Listing> {
        self.rescan();
        let all = self.tables.lock().list(uid);
        all.into_iter().map(InTables::look_at_file).collect()
    }

    /// One entry of [`Store::list`]. Scans no directory.
    pub fn status(&self, uid: u32, name: &str) -> Option<Listing> {
        let found = self.tables.lock().listing(uid, name);
        found.map(InTables::look_at_file)
    }

    /// Number of public names.
    pub fn names(&self) -> usize {
        self.tables.lock().names()
    }

    /// Number of mapped models.
    pub fn mapped(&self) -> usize {
        self.tables.lock().mapped()
    }

    /// For each name, true when every uid knows a model by it. Takes one look-up.
    pub fn are_public<'a>(&self, names: impl Iterator<Item = &'a str>) -> Vec<bool> {
        let tables = self.tables.lock();
        names.map(|name| tables.is_public(name)).collect()
    }

    /// The names of these models, as far as that uid may know them: its own name, else a directory's. An administrator
    /// also gets names of other uids.
    pub fn names_of(&self, uid: u32, administrator: bool, ids: &[ModelId]) -> HashMap<ModelId, String> {
        self.tables.lock().names_of(uid, administrator, ids)
    }

    /// The mapped model of that name, for a caller that may unload it; `None` while it is not mapped.
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
                // Some parts of a split model may still be missing.
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
        // A shortage is the daemon's fault, and the file may be sound.
        let failure = result.as_ref().err();
        if !failure.is_some_and(StoreError::is_shortage) {
            self.tables.lock().note_failure(name, &identity, failure);
        }
        result
    }

    /// A lease on the mapping of those files, existing or new.
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
                    drop(model); // before the lock: this may be the last reference to the mapping
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

    /// Waits for the result of an opening. The waiter is already counted as a user.
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

    /// Reports mappings that are gone. Call without the lock: dropping `gone` unmaps.
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

/// The message of a panic.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").to_owned()
}
