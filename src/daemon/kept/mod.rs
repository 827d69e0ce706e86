//! State that outlives a restart, kept in systemd's file descriptor store (`FileDescriptorStoreMax=`, sd_notify(3)).
//!
//! The store holds the files of models that clients passed by descriptor, as `model-N`, and a sealed memfd with a
//! `State`, as `state-N`. The state lists the owners and names of the files, rules of residency, and models locked in
//! memory. Models in directories are opened again by name; the listening socket belongs to the socket unit. So a
//! restart is a pause: the next process gets all of it back at its start ([`restore`]). Without a service manager
//! nothing is kept.
//!
//! After each change the state is computed again from the tables, and stored only if it differs. A new state is stored
//! before the old one is removed. Files are stored before the state that names them and removed after it. So whenever
//! the process is killed, the highest state is complete and its files exist.

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

/// `FileDescriptorStoreMax=` of the unit; systemd passes its own number from version 254 on (`$FDSTORE`).
const STORE_MAX: usize = 512;

/// Places reserved for states: the one in force and the next.
const STATES_MAX: usize = 2;

/// Prefixes of names in the store.
const MODEL: &str = "model-";
const STATE: &str = "state-";

/// Descriptors that the service manager had stored, with their names.
pub type Handed = Vec<(String, OwnedFd)>;

/// True for names that this program gives to stored descriptors.
pub fn is_kept_name(name: &str) -> bool {
    number_of(name, MODEL).or_else(|| number_of(name, STATE)).is_some()
}

fn number_of(name: &str, prefix: &str) -> Option<u64> {
    name.strip_prefix(prefix)?.parse().ok()
}

/// The service manager's store, and the daemon's entries in it.
#[derive(Debug)]
pub struct Kept {
    store: Arc<Store>,
    engine: EngineHandle,
    files_max: usize,
    stored: Mutex<Stored>,
}

#[derive(Debug, Default)]
struct Stored {
    /// Files by uid and name: their name in the store, and their identity.
    files: BTreeMap<(u32, String), (String, FileIdentity)>,
    state: State,
    /// Name of the stored state.
    state_name: Option<String>,
    /// Last number used for a name.
    next: u64,
    /// The stored state is authoritative; the tables are being restored from it.
    restoring: bool,
    /// Number of files without a place.
    left_out: usize,
    /// Why the last update of the store failed.
    failure: Option<String>,
}

impl Kept {
    /// An empty store. `None` without a service manager, or if it has no place.
    pub fn new(store: Arc<Store>, engine: EngineHandle) -> Option<Self> {
        std::env::var_os("NOTIFY_SOCKET")?;
        let told = std::env::var("FDSTORE").ok().and_then(|number| number.parse().ok());
        let places = told.unwrap_or(STORE_MAX).min(STORE_MAX);
        let files_max = places.checked_sub(STATES_MAX)?;
        Some(Self { store, engine, files_max, stored: Mutex::new(Rank::Kept, Stored::default()) })
    }

    /// The state according to the tables.
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

    /// Stores the files that are not stored yet, as far as there are places.
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

    /// Forgets files whose names are gone or name another file now. Returns their names in the store.
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
    fn keep_state(&self) {
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
        // Even if the update failed: a name left in the store would never be used again.
        let told = gone.iter().fold(told, |told, name| told.and(remove(name)));
        stored.failure = told.err().map(|error| error.to_string());
        if let Some(error) = &stored.failure {
            tracing::warn!(error, "storing state for the next restart in the service manager failed");
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
            text.push_str(&format!("; incomplete: {failure}"));
        }
        text
    }
}

fn store_descriptor(name: &str, fd: BorrowedFd<'_>) -> std::io::Result<()> {
    // FDPOLL=0: systemd keeps it until it is removed, even if the file reports an error or hang-up.
    let message = [NotifyState::FdStore, NotifyState::FdName(name), NotifyState::Custom("FDPOLL=0")];
    sd_notify::notify_with_fds(&message, &[fd])
}

fn remove(name: &str) -> std::io::Result<()> {
    sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)])
}

/// Makes the service manager drop descriptors that this version does not know.
pub fn drop_unknown(names: &[String]) {
    for name in names {
        tracing::warn!(name, "dropping a stored descriptor that this version does not know");
        if let Err(error) = remove(name) {
            tracing::warn!(name, %error, "removing it from the store failed");
        }
    }
}
