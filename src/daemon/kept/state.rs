//! The state that outlives a restart, as JSON in a sealed memfd.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};

use crate::scheduler::{ResidencyRules, RulesChange};
use crate::tensor::FileIdentity;

/// Version of the format below. A state of another version is not read; its files are dropped.
pub(super) const VERSION: u32 = 1;

/// Longest state that is read: rules and locks of 4,096 names each, with 255 bytes each.
const BYTES_MAX: u64 = 8 << 20;

/// No process can change the state after these seals.
const SEALS: SealFlags =
    SealFlags::SEAL.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::WRITE);

/// State that outlives a restart.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct State {
    pub version: u32,
    pub files: Vec<KeptFile>,
    pub rules: Vec<KeptRules>,
    /// Names of locked models, with the uid that owns the name; `None` for a directory's.
    pub locked: Vec<(Option<u32>, String)>,
}

/// A file that a client passed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct KeptFile {
    /// Name in the descriptor store.
    pub fd: String,
    /// The uid that passed it, and the model name it gave.
    pub uid: u32,
    pub name: String,
    /// Identity of the file at that time.
    pub identity: String,
}

/// Rules of a model, by the uid that owns the name; `None` for a directory's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct KeptRules {
    pub uid: Option<u32>,
    pub name: String,
    pinned: bool,
    priority: u8,
    parts_min: u32,
    idle_ms: Option<u64>,
}

impl KeptRules {
    pub fn new(uid: Option<u32>, name: String, rules: ResidencyRules) -> Self {
        let ResidencyRules { pinned, priority, parts_min, idle_max } = rules;
        let idle_ms = idle_max.map(|idle| u64::try_from(idle.as_millis()).unwrap_or(u64::MAX));
        Self { uid, name, pinned, priority, parts_min, idle_ms }
    }

    /// The change that sets these rules.
    pub fn change(&self) -> RulesChange {
        RulesChange {
            pinned: Some(self.pinned),
            priority: Some(self.priority),
            parts_min: Some(self.parts_min),
            idle_max: Some(self.idle_ms.map(Duration::from_millis)),
        }
    }
}

/// Why a stored state is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum StateError {
    #[error("it is not sealed, so this program did not make it")]
    NotSealed,
    #[error("it has {0} bytes, the limit is {BYTES_MAX}")]
    TooLong(u64),
    #[error("it has version {0}, this program reads version {VERSION}")]
    Version(u32),
    #[error(transparent)]
    Os(#[from] std::io::Error),
    #[error(transparent)]
    Form(#[from] serde_json::Error),
}

/// An identity as text: only ever compared as a whole.
pub(super) fn identity_text(identity: &FileIdentity) -> String {
    // Without ctime: renaming, unlinking and new permissions change it too.
    let FileIdentity { dev, ino, size, mtime_ns, .. } = identity;
    format!("{dev}:{ino}:{size}:{mtime_ns}")
}

/// Writes the state to a sealed memfd.
pub(super) fn to_memfd(state: &State) -> std::io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("rocmforge-state", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut file = File::from(fd);
    file.write_all(&serde_json::to_vec(state)?)?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    Ok(file.into())
}

/// Reads a stored state.
pub(super) fn read(fd: OwnedFd) -> Result<State, StateError> {
    // Only a memfd has seals: nothing is read from any other kind of file.
    let seals = rustix::fs::fcntl_get_seals(fd.as_fd()).unwrap_or(SealFlags::empty());
    if !seals.contains(SEALS) {
        return Err(StateError::NotSealed);
    }
    let file = File::from(fd);
    let bytes = file.metadata()?.len();
    if bytes > BYTES_MAX {
        return Err(StateError::TooLong(bytes));
    }
    let mut text = vec![0; bytes as usize];
    file.read_exact_at(&mut text, 0)?;
    let state: State = serde_json::from_slice(&text)?;
    if state.version == VERSION { Ok(state) } else { Err(StateError::Version(state.version)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> State {
        let rules = ResidencyRules {
            pinned: true,
            priority: 7,
            parts_min: 3,
            idle_max: Some(Duration::from_secs(60)),
        };
        State {
            version: VERSION,
            files: vec![KeptFile {
                fd: "model-1".into(),
                uid: 1000,
                name: "a".into(),
                identity: "1:2:3:4".into(),
            }],
            rules: vec![KeptRules::new(None, "b\"\u{e9}".into(), rules)],
            locked: vec![(Some(0), "c".into()), (None, "d".into())],
        }
    }

    #[test]
    fn a_list_comes_back_as_it_was() {
        let read = read(to_memfd(&state()).unwrap()).unwrap();
        assert_eq!(read, state());
        let change = read.rules[0].change();
        assert_eq!((change.pinned, change.priority, change.parts_min), (Some(true), Some(7), Some(3)));
        assert_eq!(change.idle_max, Some(Some(Duration::from_secs(60))));
    }

    #[test]
    fn a_foreign_list_is_refused_by_name() {
        let fd = rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
        assert!(matches!(read(fd), Err(StateError::NotSealed)));
        let file = tempfile::tempfile().unwrap();
        assert!(matches!(read(file.into()), Err(StateError::NotSealed)));
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(matches!(read(pipe), Err(StateError::NotSealed)));
        let later = State { version: VERSION + 1, ..state() };
        assert!(matches!(read(to_memfd(&later).unwrap()), Err(StateError::Version(2))));
        let sealed = |text: &[u8]| {
            let fd = rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
            let mut file = File::from(fd);
            file.write_all(text).unwrap();
            rustix::fs::fcntl_add_seals(&file, SEALS).unwrap();
            read(file.into())
        };
        for text in ["", "{}", "[1]", "{\"version\":1}", "\u{0}"] {
            assert!(matches!(sealed(text.as_bytes()), Err(StateError::Form(_))), "{text}");
        }
        // Fields that a later version adds are ignored.
        let mut more = serde_json::to_value(state()).unwrap();
        more["more"] = 1.into();
        assert_eq!(sealed(more.to_string().as_bytes()).unwrap(), state());
    }
}
