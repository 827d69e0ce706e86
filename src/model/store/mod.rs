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
//! Calls block: they open and stat files, and wait for an opener. Runtime threads may call [`Store::acquire_now`] alone. One lock,
//! `tables`, guards look-ups only; no file is opened or unmapped and no callback runs under it.
//!
//! A file system's server may never answer. So files are opened, examined, read and closed on other threads
//! ([`crate::aside`]), and calls return an error if no answer comes. A file whose pages may not come is not mapped: a
//! copy in memory is (`copy`).

use std::collections::HashMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::files::PassedCharge;
use super::{Model, ModelId};
use crate::aside::{Aside, Limits, ReceivedFd};
use crate::lock::{Condvar, Guard, Mutex, Rank};
use crate::numbers::Numbers;
use crate::share::limits::UserLimits;
use crate::share::{Shares, Taker};
use crate::tensor::{FileIdentity, MapError, MappedFile};

mod acquire;
mod confirm;
mod copy;
mod directory;
mod error;
#[cfg(test)]
mod hanging_tests;
mod keeper;
mod listing;
mod mounts;
mod nameless;
mod names;
mod ollama;
mod pages;
mod room;
mod scan;
mod shards;
mod survey;
mod tables;
#[cfg(test)]
mod tests;
mod walk;

use copy::Outstanding;
pub use error::{CopyError, NoAnswer, OpenError, StoreError};
use keeper::Keeper;
use listing::InTables;
pub use listing::{Listing, ModelStatus};
pub use names::Passed;
use scan::Scan;
pub use survey::{Survey, Unserved};
use tables::{Gone, Tables};

/// Most names from all directories.
pub const NAMES_MAX: usize = 4096;

/// Longest name of a model, in bytes.
pub const NAME_BYTES_MAX: usize = 255;

/// Builds a model from its files: [`Model::open_beside`], plus a check that a device can run it. The charge is that of the
/// uid that passed the file; models of the directories are not charged.
pub type Opener =
    dyn Fn(ModelId, &str, Vec<File>, Option<PassedCharge>) -> Result<Model, OpenError> + Send + Sync;

/// Identity of a model: the identity of each open file, in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Identity(Arc<[FileIdentity]>);

impl Identity {
    /// Refuses files that cannot be mapped. Asks the file system.
    fn of(files: &[File]) -> Result<Self, MapError> {
        Ok(Self(files.iter().map(MappedFile::inspect).collect::<Result<_, _>>()?))
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
    /// Scans of the directories.
    scan: Mutex<Scan>,
    /// Notified when a directory was read, and at the end of each scan.
    scanned: Condvar,
    /// Threads that ask file systems.
    aside: Arc<Aside>,
    /// Copies of files in memory that are being made.
    copies: Outstanding,
    numbers: Numbers,
    /// Bounds the files that each uid passes.
    users: Arc<UserLimits>,
    /// Heap bytes of passed models' headers.
    headers: Arc<Shares>,
    /// Address space of passed models.
    mapped: Arc<Shares>,
    /// Descriptors of passed models.
    descriptors: Arc<Shares>,
    /// Clients may pass files of network and user file systems.
    remote_files: AtomicBool,
    open: Box<Opener>,
    on_gone: Box<OnGone>,
    keeper: Arc<Keeper>,
}

/// Address space that passed models may take. A process has 128 TiB on x86-64. A sparse file of any size costs nothing on disk: 64
/// of them left no address for the daemon's own memory, which ended it.
const MAPPED_BYTES_MAX: u64 = 16 << 40;

/// Descriptors of a passed file: its own, and one for direct reads.
const DESCRIPTORS_OF_FILE: u64 = 2;

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
        users: Arc<UserLimits>,
        open: Box<Opener>,
        on_gone: Box<OnGone>,
    ) -> Arc<Self> {
        Self::within(Limits::default(), directories, users, open, on_gone)
    }

    /// As [`Store::new`], with other bounds on threads that wait for file systems: for tests, which have less patience.
    pub(crate) fn within(
        limits: Limits,
        directories: Vec<PathBuf>,
        users: Arc<UserLimits>,
        open: Box<Opener>,
        on_gone: Box<OnGone>,
    ) -> Arc<Self> {
        Arc::new(Self {
            tables: Mutex::new(Rank::StoreTables, Tables::new(directories)),
            opened: Condvar::new(),
            scan: Mutex::new(Rank::StoreScan, Scan::default()),
            scanned: Condvar::new(),
            aside: Aside::new(limits),
            copies: Outstanding::default(),
            numbers: Numbers::default(),
            users,
            headers: Shares::new(u64::MAX),
            mapped: Shares::new(MAPPED_BYTES_MAX),
            descriptors: Shares::new(u64::MAX),
            remote_files: AtomicBool::new(false),
            open,
            on_gone,
            keeper: Keeper::new(),
        })
    }

    /// Sets whether clients may pass files of network and user file systems, which may hang. Initially they may not.
    pub fn allow_remote_files(&self, allow: bool) {
        self.remote_files.store(allow, Ordering::Relaxed);
    }

    /// Heap bytes of the headers of passed models, which users share. Unbounded until [`Shares::set`].
    pub fn headers(&self) -> &Arc<Shares> {
        &self.headers
    }

    /// Address space of passed models, by user: about the bytes of their files.
    pub fn passed_bytes(&self) -> Vec<(u32, u64)> {
        self.mapped.holdings()
    }

    /// Descriptors of passed models, which users share. Unbounded until [`Shares::set`].
    pub fn passed_descriptors(&self) -> &Arc<Shares> {
        &self.descriptors
    }

    /// Replaces the model directories. The known models stay until the next scan.
    pub fn set_directories(&self, directories: Vec<PathBuf>) {
        self.tables.lock().directories = directories;
    }

    /// The threads that ask file systems.
    pub fn aside(&self) -> &Arc<Aside> {
        &self.aside
    }

    /// Number and bytes of the mapped models that are copies in memory.
    pub fn copied(&self) -> (usize, u64) {
        let models = self.tables.lock().mapped_models();
        let copied = models.iter().filter_map(|model| model.copied.as_ref());
        copied.fold((0, 0), |(count, bytes), copy| (count + 1, copy.bytes.saturating_add(bytes)))
    }

    /// Returns the model of that name and maps it if needed; true when this call mapped it.
    ///
    /// Checks its file again: a replaced file is mapped as a new model, and running requests finish on the old one.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn acquire(self: &Arc<Self>, uid: u32, name: &str) -> Result<(Lease, bool), StoreError> {
        if let Some(lease) = self.acquire_now(uid, name) {
            return Ok((lease, false));
        }
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
    /// [`StoreError::File`] when it is not a regular file opened for reading only; [`StoreError::Remote`];
    /// [`StoreError::NoAnswer`]; [`StoreError::Open`].
    pub fn pass(self: &Arc<Self>, uid: u32, name: &str, file: File) -> Result<(Lease, bool), StoreError> {
        self.pass_received(uid, name, ReceivedFd::of(file.into(), uid))
    }

    /// As [`Store::pass`]. A file that is refused is closed aside, wherever that is found out.
    pub(crate) fn pass_received(
        self: &Arc<Self>,
        uid: u32,
        name: &str,
        file: ReceivedFd,
    ) -> Result<(Lease, bool), StoreError> {
        let limit = self.users.of(uid).passed_models;
        let refusal = if !directory::is_name(name) {
            Some(StoreError::BadName { name: name.into() })
        } else {
            let full = !self.tables.lock().may_pass(uid, name, limit.value);
            full.then_some(StoreError::Quota { uid, limit })
        };
        if let Some(refusal) = refusal {
            return Err(refusal);
        }
        let handed = self.examine(uid, name, file, self.remote_files.load(Ordering::Relaxed))?;
        let (charge, in_memory) = (self.charge(uid, name, handed.bytes())?, handed.in_memory);
        let leased = self.lease(name, handed, Some(charge))?;
        let (lease, mapped_now) = leased.ok_or_else(|| StoreError::NotFound { name: name.into() })?;
        let mut tables = self.tables.lock();
        if !tables.may_pass(uid, name, limit.value) {
            drop(tables);
            return Err(StoreError::Quota { uid, limit });
        }
        let gone = tables.set_passed(uid, name, lease.model.id);
        if in_memory {
            tables.in_memory.insert(lease.model.id);
        }
        drop(tables);
        self.tell(gone);
        self.keep_pages(uid, name, lease.model());
        Ok((lease, mapped_now))
    }

    /// Charges a user for a passed file of so many bytes.
    fn charge(&self, uid: u32, name: &str, bytes: u64) -> Result<PassedCharge, StoreError> {
        let taker = Taker::of(uid);
        let refused = |refusal| StoreError::NoDescriptor { name: name.into(), refusal };
        let descriptors = self.descriptors.take(taker, DESCRIPTORS_OF_FILE).map_err(refused)?;
        let refused = |refusal| StoreError::TooLarge { name: name.into(), refusal };
        let mapped = self.mapped.take(taker, bytes).map_err(refused)?;
        let header = self.headers.take(taker, 0).map_err(refused)?; // nothing is never refused
        Ok(PassedCharge { header, mapped, descriptors })
    }

    /// Unloads a model. A passed model loses its name; the mapping is removed when nothing uses it. A directory's name
    /// stays, as do all directory names of the same file; the next request maps the file again. A file that also has
    /// another passed name, or a directory's name besides the passed one, stays mapped for that name. Only a caller that
    /// `manages` the daemon's models unloads a directory's name.
    ///
    /// # Errors
    /// [`StoreError::NotFound`], [`StoreError::NotYours`].
    pub fn unload(&self, uid: u32, manages: bool, name: &str) -> Result<Unloaded, StoreError> {
        let draining_max = self.users.of(uid).passed_models.value;
        let mut tables = self.tables.lock();
        let (unloaded, gone) = tables.unload(uid, manages, name, draining_max)?;
        tables.unpin(uid, name);
        drop(tables);
        self.tell(gone);
        self.want_pages();
        Ok(unloaded)
    }

    /// As [`Store::unload`], of the names of passed files alone; `None` if the uid has none of that name.
    pub fn unload_passed(&self, uid: u32, name: &str) -> Option<Unloaded> {
        let draining_max = self.users.of(uid).passed_models.value;
        let mut tables = self.tables.lock();
        let (unloaded, gone) = tables.unload_own(uid, name, draining_max)?;
        tables.unpin(uid, name);
        drop(tables);
        self.tell(gone);
        self.want_pages();
        Some(unloaded)
    }

    /// All names that this uid can request, in order.
    pub fn list(self: &Arc<Self>, uid: u32) -> Vec<Listing> {
        self.rescan();
        let all = self.tables.lock().list(uid);
        all.into_iter().map(|found| self.look_at_file(found)).collect()
    }

    /// One entry of [`Store::list`]. Scans no directory.
    pub fn status(&self, uid: u32, name: &str) -> Option<Listing> {
        let found = self.tables.lock().listing(uid, name);
        found.map(|found| self.look_at_file(found))
    }

    fn look_at_file(&self, found: InTables) -> Listing {
        found.look_at_file(|name, device| self.aside.silent(name, device))
    }

    /// Number of public names.
    pub fn names(&self) -> usize {
        self.tables.lock().names()
    }

    /// Number of mapped models.
    pub fn mapped(&self) -> usize {
        self.tables.lock().mapped()
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
    pub fn owned(&self, uid: u32, manages: bool, name: &str) -> Result<Option<Arc<Model>>, StoreError> {
        self.tables.lock().owned(uid, manages, name)
    }

    /// Reports mappings that are gone. Call without the lock: dropping `gone` unmaps.
    fn tell(&self, gone: Gone) {
        self.let_retired_pages_go();
        for (id, _slot) in &gone {
            (self.on_gone)(*id);
        }
    }
}
