//! Restores the stored state in the next process.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::state::{self, KeptFile, KeptRules, State};
use super::{Handed, Kept, MODEL, STATE, Stored, drop_unknown, number_of};
use crate::model::store::Store;
use crate::scheduler::EngineHandle;
use crate::session::OutlivesRestart;
use crate::tensor::{FileIdentity, MappedFile};

/// Work left to do once clients are answered: it maps models.
#[derive(Debug, Default)]
pub struct Rest {
    rules: Vec<KeptRules>,
    locked: Vec<(Option<u32>, String)>,
}

/// Maps the files again that clients had passed, under their names. Drops from the store, and logs, what cannot be
/// restored: a file that changed meanwhile, an unlisted file, a state of another version. Blocks for some milliseconds
/// per model.
pub fn restore(kept: &Kept, handed: Handed) -> Rest {
    let (state_name, state, mut files, useless) = sort(handed);
    let mut stored = kept.stored.lock();
    stored.next = state_name.as_deref().and_then(|name| number_of(name, STATE)).unwrap_or(0);
    let highest = files.keys().filter_map(|name| number_of(name, MODEL)).max().unwrap_or(0);
    stored.next = stored.next.max(highest);
    let State { files: listed, rules, locked, .. } = state.clone();
    stored.state = state;
    stored.state_name = state_name;
    // Until the rules are set again, the tables would say that there are none.
    stored.restoring = true;
    for file in listed {
        let Some(fd) = files.remove(&file.fd) else {
            tracing::warn!(uid = file.uid, model = file.name, "a passed file was not stored: load it again");
            continue;
        };
        if useless.contains(&file.fd) {
            if let Err(reason) = pass(&kept.store, &file, fd) {
                tracing::warn!(uid = file.uid, model = file.name, "{LOST}: {reason}");
            }
            continue;
        }
        if let Err(reason) = take(&mut stored, &kept.store, &file, fd) {
            tracing::warn!(uid = file.uid, model = file.name, "{LOST}: {reason}");
            drop_one(&file.fd);
        }
    }
    if !stored.files.is_empty() {
        tracing::info!(files = stored.files.len(), "restored passed files after the restart");
    }
    drop(stored);
    let unknown: Vec<String> = useless.into_iter().chain(files.into_keys()).collect();
    drop_unknown(&unknown);
    Rest { rules, locked }
}

/// Separates the newest readable state, its name, the files by name, and the names of all other descriptors.
fn sort(handed: Handed) -> (Option<String>, State, BTreeMap<String, OwnedFd>, Vec<String>) {
    let (mut states, mut files) = (BTreeMap::new(), BTreeMap::new());
    let mut useless = Vec::new();
    for (name, fd) in handed {
        match (number_of(&name, STATE), number_of(&name, MODEL)) {
            // Of two descriptors with one name, the first counts. Removing the name drops both; the file is stored again
            // under a new name.
            (Some(number), _) => drop(states.entry(number).or_insert((name, fd))),
            (_, Some(_)) if files.contains_key(&name) => useless.push(name),
            (_, Some(_)) => drop(files.insert(name, fd)),
            _ => useless.push(name),
        }
    }
    let mut found = None;
    for (name, fd) in states.into_values().rev() {
        if found.is_some() {
            useless.push(name); // the process was killed before it removed this state
            continue;
        }
        match state::read(fd) {
            Ok(state) => found = Some((name, state)),
            Err(error) => {
                tracing::warn!(name, %error, "a stored list of models cannot be used");
                useless.push(name);
            }
        }
    }
    let (name, state) = found.map_or((None, State::default()), |(name, state)| (Some(name), state));
    (name, state, files, useless)
}

/// Log message for a lost file.
const LOST: &str = "a passed file was lost at the restart";

/// Passes a file to the model store under its name and records it.
fn take(stored: &mut Stored, store: &Arc<Store>, kept: &KeptFile, fd: OwnedFd) -> Result<(), String> {
    let identity = pass(store, kept, fd)?;
    stored.files.insert((kept.uid, kept.name.clone()), (kept.fd.clone(), identity));
    Ok(())
}

fn pass(store: &Arc<Store>, kept: &KeptFile, fd: OwnedFd) -> Result<FileIdentity, String> {
    let file = File::from(fd);
    let identity = MappedFile::inspect(&file).map_err(|error| error.to_string())?;
    if state::identity_text(&identity) != kept.identity {
        return Err("the file changed after it was passed: load it again".to_owned());
    }
    let passed = store.pass(kept.uid, &kept.name, file);
    passed.map(|_| identity).map_err(|error| error.to_string())
}

fn drop_one(name: &str) {
    if let Err(error) = super::remove(name) {
        tracing::warn!(name, %error, "removing it from the store failed");
    }
}

impl Rest {
    /// Names of directory models that have rules to restore.
    pub fn ruled(&self) -> BTreeSet<String> {
        self.rules.iter().filter(|rules| rules.uid.is_none()).map(|rules| rules.name.clone()).collect()
    }

    /// Sets rules and locks again, mapping models as needed. Logs each model for which that fails.
    pub async fn bring(self, kept: Arc<Kept>, engine: EngineHandle) {
        let own = rustix::process::geteuid().as_raw();
        for rules in self.rules {
            let (store, uid, name) = (Arc::clone(&kept.store), rules.uid.unwrap_or(own), rules.name.clone());
            let lease = match tokio::task::spawn_blocking(move || store.acquire(uid, &name)).await {
                Ok(Ok((lease, _))) => lease,
                Ok(Err(error)) => {
                    tracing::warn!(
                        model = rules.name,
                        "the model's rules from before the restart are lost: {error}"
                    );
                    continue;
                }
                Err(_) => return, // the daemon stops
            };
            if let Err(error) = engine.set_rules(lease.model(), rules.change()).await {
                tracing::warn!(
                    model = rules.name,
                    "the model's rules from before the restart are lost: {error}"
                );
            }
        }
        let lock = move || {
            for (uid, name) in self.locked {
                if let Err(error) = kept.store.pin(uid.unwrap_or(own), true, &name) {
                    tracing::warn!(
                        model = name,
                        "the model was locked before the restart; locking it again failed: {error}"
                    );
                }
            }
            // From here on the tables are complete.
            kept.stored.lock().restoring = false;
            kept.keep_state();
        };
        drop(tokio::task::spawn_blocking(lock).await);
    }
}
