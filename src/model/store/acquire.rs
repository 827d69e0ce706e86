//! From a name to a lease: the file is opened aside, then mapped, or a copy of it.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::copy::{self, Original};
use super::directory::Entry;
use super::error::{CopyError, NoAnswer, OpenError, StoreError, file_error};
use super::tables::{Opened, Slot, SlotState, Tables};
use super::{Identity, Lease, Source, Store, mounts};
use crate::aside::{self, ReceivedFd, Subject, Unanswered};
use crate::lock::Guard;
use crate::model::files::PassedCharge;
use crate::model::{Copied, Model, ModelId};
use crate::tensor::{MapError, is_shortage};

/// An open file of a model.
pub(super) struct OpenFile {
    pub(super) file: File,
    /// Type of its file system, if that one's server may hang.
    pub(super) served: Option<String>,
}

/// A model's files, opened.
pub(super) struct Handed {
    identity: Identity,
    /// `None` if these files are mapped already.
    pub(super) files: Option<Vec<OpenFile>>,
    /// The names whose threads may work on them: see [`Subject::name`].
    gate: String,
    /// A passed file in memory, which is to go with its name.
    pub(super) in_memory: bool,
}

impl Handed {
    /// Bytes that a mapping of the files takes.
    pub(super) fn bytes(&self) -> u64 {
        self.identity.0.iter().fold(0, |bytes, file| file.size.saturating_add(bytes))
    }
}

/// Why files were not opened.
pub(super) enum Fault {
    Open(std::io::Error),
    Inspect(MapError),
    /// On a file system of that type, which is not allowed.
    Remote(String),
    /// In memory that only open files hold, or with holes there.
    InMemory,
}

impl Store {
    pub(super) fn acquire_passed(self: &Arc<Self>, name: &str, id: ModelId) -> Result<Lease, StoreError> {
        let not_found = || StoreError::NotFound { name: name.into() };
        let model = self.tables.lock().ready(id).ok_or_else(not_found)?;
        // Asks no server: what is mapped is a local file or a copy in memory.
        match model.files.check_poison().and_then(|()| model.files.check_untouched()) {
            Ok(()) => {}
            Err(MapError::Poisoned) => return Err(StoreError::Poisoned { name: name.into() }),
            Err(_) => return Err(StoreError::Changed { name: name.into() }),
        }
        let used = self.tables.lock().revive_and_use(id);
        used.then(|| Lease { store: Arc::clone(self), model }).ok_or_else(not_found)
    }

    pub(super) fn acquire_entry(
        self: &Arc<Self>,
        uid: u32,
        name: &str,
        entry: &Entry,
    ) -> Result<(Lease, bool), StoreError> {
        let unusable = |reason: String| Err(StoreError::Unusable { name: name.into(), reason });
        if let (true, Some(reason)) = (entry.incomplete, &entry.unusable) {
            return unusable(reason.clone());
        }
        let mut again = false;
        loop {
            let handed = match self.open_entry(name, entry, again)? {
                Ok(handed) => handed,
                Err(Fault::Open(error)) if error.kind() == std::io::ErrorKind::NotFound => {
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
                Err(Fault::Open(source)) if is_shortage(&source) => {
                    return Err(file_error(name, MapError::Os { what: "open", source }));
                }
                Err(Fault::Open(error)) => return unusable(error.to_string()),
                Err(Fault::Inspect(source)) => return Err(file_error(name, source)),
                Err(Fault::Remote(file_system)) => {
                    return Err(StoreError::Remote { name: name.into(), file_system });
                }
                Err(Fault::InMemory) => return Err(StoreError::InMemory { name: name.into() }),
            };
            let identity = handed.identity.clone();
            let gone = self.tables.lock().seen(name, &identity);
            self.tell(gone);
            let result = self.lease(name, handed, None);
            // A failure of the daemon or of a file server says nothing about the file.
            let failure = result.as_ref().err();
            if !failure.is_some_and(StoreError::passes) {
                self.tables.lock().note_failure(name, &identity, failure);
            }
            match result? {
                Some(lease) => return Ok(lease),
                None => again = true, // unloaded at this moment: now its files are needed
            }
        }
    }

    /// Opens a directory's files on a thread that may be lost. Unless `again`, files that are mapped already are closed
    /// there too.
    pub(super) fn open_entry(
        self: &Arc<Self>,
        name: &str,
        entry: &Entry,
        again: bool,
    ) -> Result<Result<Handed, Fault>, StoreError> {
        let (store, device, gate) = (Arc::clone(self), entry.device, name.to_owned());
        let subject = Subject { what: "opening the file", name: gate.clone(), device };
        let entry = entry.clone();
        let opened = self.aside.run(subject, move |errand| {
            let files = match entry.open() {
                Ok(files) => files,
                Err(error) => return errand.answer(Err(Fault::Open(error))),
            };
            match Identity::of(&files) {
                Err(source) => errand.answer(Err(Fault::Inspect(source))),
                Ok(identity) if !again && store.tables.lock().is_ready(&identity) => {
                    errand.answer(Ok(Handed { identity, files: None, gate, in_memory: false }));
                }
                Ok(identity) => {
                    let open = |file| OpenFile { served: mounts::served(&file), file };
                    let files = Some(files.into_iter().map(open).collect());
                    errand.answer(Ok(Handed { identity, files, gate, in_memory: false }));
                }
            }
        });
        opened.map_err(|why| no_answer(name, device, why))
    }

    /// Examines a passed file on a thread that may be lost.
    pub(super) fn examine(
        self: &Arc<Self>,
        uid: u32,
        name: &str,
        received: ReceivedFd,
        allow_remote: bool,
    ) -> Result<Handed, StoreError> {
        let gate = format!("files passed by uid {uid}");
        let subject = Subject { what: "examining the passed file", name: gate.clone(), device: None };
        let examined = self.aside.run(subject, move |errand| {
            let Some(file) = received.file() else { return };
            let served = mounts::served(file);
            let refused = served.clone().filter(|_| !allow_remote);
            // A pipe is of no mount that this process sees, and is refused as what it is.
            if let Some(file_system) = refused.clone().filter(|kind| kind != mounts::FOREIGN) {
                return errand.answer(Err(Fault::Remote(file_system)));
            }
            match (Identity::of(std::slice::from_ref(file)), refused) {
                (Err(source), _) => errand.answer(Err(Fault::Inspect(source))),
                (Ok(_), None) if !allow_remote && served.is_none() && mounts::only_holds_memory(file) => {
                    errand.answer(Err(Fault::InMemory));
                }
                (Ok(_), Some(file_system)) => errand.answer(Err(Fault::Remote(file_system))),
                (Ok(identity), None) => {
                    let Some(file) = received.into_file() else { return };
                    let in_memory = !allow_remote && mounts::is_in_memory(&file);
                    let files = Some(vec![OpenFile { file, served }]);
                    errand.answer(Ok(Handed { identity, files, gate, in_memory }));
                }
            }
        });
        let examined = examined.map_err(|why| no_answer(name, None, why))?;
        examined.map_err(|fault| match fault {
            Fault::Remote(file_system) => StoreError::Remote { name: name.into(), file_system },
            Fault::InMemory => StoreError::InMemory { name: name.into() },
            Fault::Inspect(source) => file_error(name, source),
            Fault::Open(source) => file_error(name, MapError::Os { what: "open", source }),
        })
    }

    /// A lease on the mapping of those files, existing or new. `None` if they are not mapped and were not handed.
    pub(super) fn lease(
        self: &Arc<Self>,
        name: &str,
        handed: Handed,
        charge: Option<PassedCharge>,
    ) -> Result<Option<(Lease, bool)>, StoreError> {
        let Handed { identity, files, gate, .. } = handed;
        let mut files = files;
        let mut tables = self.tables.lock();
        let id = loop {
            match tables.current(&identity) {
                None => break ModelId(self.numbers.draw()),
                Some((id, SlotState::Ready(model))) if model.files.check_poison().is_err() => {
                    let gone = tables.retire(id);
                    drop(tables);
                    self.tell(gone);
                    drop(model); // before the lock: this may be the last reference to the mapping
                    tables = self.tables.lock();
                }
                Some((id, SlotState::Ready(model))) => {
                    tables.revive_and_use(id);
                    drop(tables);
                    self.close(files);
                    return Ok(Some((Lease { store: Arc::clone(self), model }, false)));
                }
                Some((id, SlotState::Opening(flight))) => {
                    tables.revive_and_use(id);
                    let waiters = tables.in_use(id);
                    drop(tables);
                    let file_system = files.iter().flatten().find_map(|file| file.served.clone());
                    self.close(files.take());
                    let opened = self.wait(id, &flight, file_system, waiters);
                    let model = opened.map_err(|source| StoreError::Open { name: name.into(), source })?;
                    return Ok(Some((Lease { store: Arc::clone(self), model }, false)));
                }
            }
        };
        let Some(files) = files else { return Ok(None) };
        let flight: Arc<Opened> = Arc::new(OnceLock::new());
        tables.insert(id, Slot::opening(identity.clone(), Arc::clone(&flight)));
        drop(tables);

        let opening = || self.open_files(id, name, &gate, files, &identity, charge);
        let result = catch_unwind(AssertUnwindSafe(opening))
            .unwrap_or_else(|panic| Err(OpenError::Panicked(aside::panic_text(&*panic))));
        let result = result.map(Arc::new).map_err(Arc::new);
        let mut tables = self.tables.lock();
        match &result {
            Ok(model) => tables.opened(id, model),
            Err(_) => tables.failed(id),
        }
        let _ = flight.set(result.clone());
        drop(tables);
        self.opened.notify_all();
        match result {
            Ok(model) => Ok(Some((Lease { store: Arc::clone(self), model }, true))),
            Err(source) => Err(StoreError::Open { name: name.into(), source }),
        }
    }

    /// Waits for the result of an opening. The waiter is already counted as a user. Of the requests that wait for a copy,
    /// which may take minutes, only a few wait to the end.
    fn wait(
        &self,
        id: ModelId,
        flight: &Opened,
        file_system: Option<String>,
        waiters: u32,
    ) -> Result<Arc<Model>, Arc<OpenError>> {
        let limits = self.aside.limits();
        let crowd = file_system.filter(|_| waiters as usize > limits.of_name);
        let until = Instant::now() + limits.wait;
        let mut tables: Guard<'_, Tables> = self.tables.lock();
        loop {
            if let Some(result) = flight.get() {
                return result.clone();
            }
            match &crowd {
                None => self.opened.wait(&mut tables),
                Some(file_system) => {
                    if self.opened.wait_until(&mut tables, until) {
                        let gone = tables.release(id);
                        drop(tables);
                        self.tell(gone);
                        let file_system = file_system.clone();
                        return Err(Arc::new(CopyError::UnderWay { file_system, waiters }.into()));
                    }
                }
            }
        }
    }

    /// Opens the model of these files. Files whose server may hang are copied into memory first.
    fn open_files(
        &self,
        id: ModelId,
        name: &str,
        gate: &str,
        files: Vec<OpenFile>,
        identity: &Identity,
        charge: Option<PassedCharge>,
    ) -> Result<Model, OpenError> {
        let (mut local, mut copied) = (Vec::new(), None::<Copied>);
        let mut files = files.into_iter().zip(identity.0.iter());
        while let Some((OpenFile { file, served }, identity)) = files.next() {
            let Some(file_system) = served else {
                local.push(file);
                continue;
            };
            let bytes = copied.take().map_or(0, |copied| copied.bytes).saturating_add(identity.size);
            copied = Some(Copied { file_system: file_system.clone(), bytes });
            let original = Original { file, file_system, identity: *identity, model: name.to_owned() };
            match copy::into_memory(&self.aside, &self.copies, gate, original) {
                Ok(copy) => local.push(copy),
                Err(error) => {
                    self.close(Some(files.map(|(file, _)| file).collect()));
                    return Err(error.into());
                }
            }
        }
        let mut model = (self.open)(id, name, local, charge)?;
        model.copied = copied;
        Ok(model)
    }

    /// Closes files. To close one asks its server, so that happens aside.
    pub(super) fn close(&self, files: Option<Vec<OpenFile>>) {
        for OpenFile { file, served } in files.into_iter().flatten() {
            if served.is_some() {
                self.aside.let_go(String::new(), file);
            }
        }
    }
}

fn no_answer(name: &str, device: Option<u64>, why: Unanswered) -> StoreError {
    let file_system = device.and_then(mounts::type_of_device).unwrap_or_else(|| "of unknown type".to_owned());
    StoreError::NoAnswer { name: name.into(), source: NoAnswer { file_system, why, arrived: None } }
}
