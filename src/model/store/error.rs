//! Why the store cannot provide a model.

use std::sync::Arc;

use super::NAME_BYTES_MAX;
use crate::aside::Unanswered;
use crate::backend::BackendError;
use crate::model::ModelError;
use crate::share::Refusal;
use crate::share::limits::Limit;
use crate::tensor::MapError;

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
    /// A passed file changed after it was passed: its content, or its name or permissions, which change the same time.
    #[error(
        "{name}: the file was rewritten, renamed or otherwise changed since it was passed: load it again"
    )]
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
    /// Other users may use the model too: it is in a directory, or another uid passed the same file.
    #[error(
        "{name} is also other users': only an administrator, or a user that policy.manage names, may do that"
    )]
    NotYours {
        /// Requested name.
        name: String,
    },
    /// A client passed a file of a file system whose server may hang, and the configuration does not allow that.
    #[error(
        "{name} is on {file_system}, whose server may hang. Such files that clients pass are not served, as a copy of each \
         would be held in memory: copy the file to a local disk; an administrator may allow it with \
         limits.passed_remote_files"
    )]
    Remote {
        /// Requested name.
        name: String,
        /// Type of the file system, as the kernel names it.
        file_system: String,
    },
    /// A client passed a file in memory that would stay there for as long as the daemon has it, counted for nobody.
    #[error(
        "{name} is a file in memory without a name, with holes, or on a mount that the daemon does not see: its memory would \
         outlive its owner. Copy the file to a disk; an administrator may allow it with limits.passed_remote_files"
    )]
    InMemory {
        /// Requested name.
        name: String,
    },
    /// The file system's server does not answer.
    #[error("{name}: {source}")]
    NoAnswer {
        /// Requested name.
        name: String,
        /// The operation and the file system.
        source: NoAnswer,
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
    #[error(
        "no further file can be passed by descriptor; {}: {}",
        limit.words(*uid),
        if limit.value == 0 { "name a model of the daemon's directories" } else { "unload one first" }
    )]
    Quota {
        /// The uid.
        uid: u32,
        /// Its most passed files.
        limit: Limit,
    },
    /// The mappings of passed files leave no room in the daemon's address space.
    #[error("{name}: no room for the mapping of this file: {}: unload one first", refusal.told(1 << 30, "GiB"))]
    TooLarge {
        /// Requested name.
        name: String,
        /// The refusal of its bytes.
        refusal: Refusal,
    },
    /// Passed files hold all descriptors that they may.
    #[error("{name}: no descriptor is left for this file: {}: unload one first", refusal.told(1, "descriptors"))]
    NoDescriptor {
        /// Requested name.
        name: String,
        /// The refusal of its descriptors.
        refusal: Refusal,
    },
    /// Too many models are pinned.
    #[error("{limit} models are pinned already: unpin one first")]
    Pins {
        /// Most pinned models.
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
                OpenError::Backend(_) | OpenError::Copy(_) | OpenError::Panicked(_) => false,
            },
            _ => false,
        }
    }

    /// True when the file may be sound, and the same request may succeed later: a shortage, or a server that is silent.
    pub(super) fn passes(&self) -> bool {
        let copy = |source: &OpenError| {
            matches!(
                source,
                OpenError::Copy(
                    CopyError::NoAnswer(_) | CopyError::NoRoom { .. } | CopyError::UnderWay { .. }
                )
            )
        };
        match self {
            Self::NoAnswer { .. } => true,
            Self::Open { source, .. } => copy(source) || self.is_shortage(),
            _ => self.is_shortage(),
        }
    }
}

/// A file system whose server does not answer.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "its file system ({file_system}) does not answer: {why}{}. Other models are served meanwhile. Mend the file system's \
     server, unmount it (umount -f), or copy the file to a local disk",
    arrived_text(*arrived)
)]
pub struct NoAnswer {
    /// Type of the file system, as the kernel names it.
    pub file_system: String,
    /// The operation that had no answer, and for how long.
    pub why: Unanswered,
    /// Bytes that had arrived, and bytes of the file; `None` unless it was being read.
    pub arrived: Option<(u64, u64)>,
}

fn arrived_text(arrived: Option<(u64, u64)>) -> String {
    arrived.map(|(now, all)| format!("; {now} of {all} bytes had arrived")).unwrap_or_default()
}

/// Why a file could not be copied into memory.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The server stopped answering.
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    /// The copy needs more than half of the memory that is free.
    #[error(
        "the file is on {file_system}, whose server may hang, so it is served from a copy in memory. Its {bytes} bytes \
         exceed half of the {available_bytes} that are available: copy the file to a local disk, or free memory"
    )]
    NoRoom {
        /// Type of the file system.
        file_system: String,
        /// Bytes of the file.
        bytes: u64,
        /// Bytes available, less what other copies still need.
        available_bytes: u64,
    },
    /// Others wait for the same copy, as many as may.
    #[error(
        "the file is being copied from {file_system} into memory, and {waiters} requests wait for that: try again later"
    )]
    UnderWay {
        /// Type of the file system.
        file_system: String,
        /// Requests that use the model or wait for it.
        waiters: u32,
    },
    /// The operating system refused an operation.
    #[error(
        "the file on {file_system} could not be copied into memory: {what} failed after {copied} of {bytes} bytes: {source}"
    )]
    Os {
        /// Type of the file system.
        file_system: String,
        /// The operation.
        what: &'static str,
        /// Bytes copied.
        copied: u64,
        /// Bytes of the file.
        bytes: u64,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The file changed or lost bytes while it was copied.
    #[error("the file changed while its {bytes} bytes were copied into memory: ask again once it is whole")]
    Changed {
        /// Bytes of the file at the start.
        bytes: u64,
    },
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
    /// The file could not be copied into memory.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The opener panicked: a bug in the daemon.
    #[error("internal error while the file was read: {0}")]
    Panicked(String),
}

pub(super) fn file_error(name: &str, source: MapError) -> StoreError {
    StoreError::File { name: name.into(), source: Arc::new(source) }
}
