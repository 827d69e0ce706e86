//! What outlives a restart: in systemd's file descriptor store (`FileDescriptorStoreMax=`, sd_notify(3)).
//!
//! Stored are the files of models that clients passed by descriptor, as `model-N`, and a sealed memfd with a `State`, as `state-N`:
//! whose the files are and what they are called, rules of residency, and which models are locked in memory. What lies in a
//! directory is opened again by its name; the listening socket is the socket unit's. So a restart is a pause: the next process gets
//! all of it back at its start ([`restore`]). Without a service manager there is no store, and nothing is kept.
//!
//! The state is computed anew from the tables after each change and stored only where it differs. A new state is stored before the
//! old one is removed, files before the state that names them and removed after it: whenever the process is killed, the highest
//! state is whole and its files are there.

mod restore;
mod state;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use sd_notify::NotifyState;

pub use restore::{Rest, restore};
use state::{KeptFile, KeptRules, State};

use crate::lock::{Mutex, Rank};
use crate::model::store::{Passed, Store};
use crate::scheduler::{EngineHandle, ResidencyRules};
use crate::session::OutlivesRestart;
use crate::tensor::FileIdentity;

/// `FileDescriptorStoreMax=` of the unit; systemd tells its own number from version 254 on (`$FDSTORE`).
const STORE_MAX: usize = 512;

/// Of these for states: the one in force and the next.
const STATES_MAX: usize = 2;

/// How names in the store begin.
const MODEL: &str = "model-";
const STATE: &str = "state-";

/// Descriptors that the service manager had stored, by their names.
pub type Handed = Vec<(String, OwnedFd)>;

/// True for the names of what this program stores.
pub fn is_kept_name(name: &str) -> bool {
    number_of(name, MODEL).or_else(|| number_of(name, STATE)).is_some()
}

fn number_of(name: &str, prefix: &str) -> Option<u64> {
    name.strip_prefix(prefix)?.parse().ok()
}

/// The service manager's store, and what of ours is in it.
#[derive(Debug)]
pub struct Kept {
    store: Arc<Store>,
    engine: EngineHandle,
    files_max: usize,
    stored: Mutex<Stored>,
}

#[derive(Debug, Default)]
struct Stored {
    /// Files by uid and name: what they are called in the store, and what they are.
    files: BTreeMap<(u32, String), (String, FileIdentity)>,
    state: State,
    /// Name of the stored state.
    state_name: Option<String>,
    /// Numbers below it were used.
    next: u64,
    /// The stored state is what counts, and the tables are being brought to it.
    restoring: bool,
    /// Files for which there was no place.
    left_out: usize,
    /// Why the store does not have all, when it was last told.
    failure: Option<String>,
}

impl Kept {
    /// A store with nothing of ours in it. `None` without a service manager, or with one that says that it has no place.
    pub fn new(store: Arc<Store>, engine: EngineHandle) -> Option<Self> {
        std::env::var_os("NOTIFY_SOCKET")?;
        let told = std::env::var("FDSTORE").ok().and_then(|number| number.parse().ok());
        let places = told.unwrap_or(STORE_MAX).min(STORE_MAX);
        let files_max = places.checked_sub(STATES_MAX)?;
        Some(Self { store, engine, files_max, stored: Mutex::new(Rank::Kept, Stored::default()) })
    }

    /// What the tables say now.
    fn wanted(&self, files: &BTreeMap<(u32, String), (String, FileIdentity)>) -> State {
        let snapshot = self.engine.snapshot();
        let rules_of = |id| snapshot.models.iter().find(|model| model.model == id).map(|model| model.rules);
        let mut rules = Vec::new();
        for (uid, name, id) in self.store.mapped_names() {
            let ours = rules_of(id).filter(|rules| *rules != ResidencyRules::default());
            rules.extend(ours.map(|ours| KeptRules::new(uid, name, ours)));
        }
        let kept = |((uid, name), (fd, identity)): (&(u32, String), &(String, FileIdentity))| KeptFile {
            fd: fd.clone(),
            uid: *uid,
            name: name.clone(),
            identity: state::identity_text(identity),
        };
        State {
            version: state::VERSION,
            files: files.iter().map(kept).collect(),
            rules,
            locked: self.store.pinned_names(),
        }
    }
}

impl Stored {
    fn name(&mut self, prefix: &str) -> String {
        self.next += 1;
        format!("{prefix}{}", self.next)
    }

    /// Stores the files that are not there yet, as many as there is room for.
    fn add_files(&mut self, passed: &[Passed], files_max: usize) -> std::io::Result<()> {
        self.left_out = 0;
        for Passed { uid, name, model } in passed {
            let key = (*uid, name.clone());
            let Some(file) = model.files.mappings().next() else { continue };
            if self.files.contains_key(&key) {
                continue;
            }
            if self.files.len() >= files_max {
                self.left_out += 1;
                continue;
            }
            let fd_name = self.name(MODEL);
            store_descriptor(&fd_name, file.descriptor())?;
            self.files.insert(key, (fd_name, file.identity()));
        }
        Ok(())
    }

    /// Forgets files that nobody asks for any more, and those under whose name another file was passed. Their names in the store.
    fn forget_files(&mut self, passed: &[Passed]) -> Vec<String> {
        let mut now: BTreeMap<(u32, &str), FileIdentity> = BTreeMap::new();
        for passed in passed {
            if let Some(file) = passed.model.files.mappings().next() {
                now.insert((passed.uid, &passed.name), file.identity());
            }
        }
        let mut gone = Vec::new();
        self.files.retain(|(uid, name), (fd_name, identity)| {
            let same = now.get(&(*uid, name.as_str())) == Some(identity);
            if !same {
                gone.push(fd_name.clone());
            }
            same
        });
        gone
    }

    fn store_state(&mut self, state: State) -> std::io::Result<()> {
        let name = self.name(STATE);
        store_descriptor(&name, state::to_memfd(&state)?.as_fd())?;
        self.state = state;
        if let Some(old) = self.state_name.replace(name) {
            remove(&old)?;
        }
        Ok(())
    }
}

impl OutlivesRestart for Kept {
    fn settle(&self) {
        let mut stored = self.stored.lock();
        if stored.restoring {
            return;
        }
        let passed = self.store.passed();
        let gone = stored.forget_files(&passed);
        let told = stored.add_files(&passed, self.files_max).and_then(|()| {
            let wanted = self.wanted(&stored.files);
            if wanted != stored.state { stored.store_state(wanted) } else { Ok(()) }
        });
        // Also where the rest failed: a name that stays in the store is never asked for again.
        let told = gone.iter().fold(told, |told, name| told.and(remove(name)));
        stored.failure = told.err().map(|error| error.to_string());
        if let Some(error) = &stored.failure {
            tracing::warn!(error, "the service manager could not be told what outlives a restart");
        }
    }

    fn report(&self) -> String {
        let stored = self.stored.lock();
        let State { rules, locked, .. } = &stored.state;
        let mut text = format!(
            "{} of at most {} passed files, rules of {} models, {} locked",
            stored.files.len(),
            self.files_max,
            rules.len(),
            locked.len()
        );
        if stored.left_out > 0 {
            text.push_str(&format!("; no room for {} more files", stored.left_out));
        }
        if let Some(failure) = &stored.failure {
            text.push_str(&format!("; not all of it: {failure}"));
        }
        text
    }
}

fn store_descriptor(name: &str, fd: BorrowedFd<'_>) -> std::io::Result<()> {
    // FDPOLL=0: it is kept until it is removed, whatever becomes of the file.
    let message = [NotifyState::FdStore, NotifyState::FdName(name), NotifyState::Custom("FDPOLL=0")];
    sd_notify::notify_with_fds(&message, &[fd])
}

fn remove(name: &str) -> std::io::Result<()> {
    sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)])
}

/// Has the service manager drop what nobody here knows.
pub fn drop_unknown(names: &[String]) {
    for name in names {
        tracing::warn!(name, "a stored descriptor that this version does not know is dropped");
        if let Err(error) = remove(name) {
            tracing::warn!(name, %error, "it stays in the store");
        }
    }
}
