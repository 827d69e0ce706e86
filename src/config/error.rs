//! Errors of the configuration.

use std::path::PathBuf;

use super::files::{DROP_INS_MAX, FILE_BYTES_MAX};
use crate::session::SubordinatesError;
use crate::share::limits::OutOfRange;

/// Why there is no usable configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {source}; make it readable for the daemon's user, or remove it", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: std::io::Error,
    },
    /// The file is not a regular file, or is too long.
    #[error("the configuration {} is not a regular file of at most {FILE_BYTES_MAX} bytes", path.display())]
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// The file is empty, at a reload or a check.
    #[error(
        "the configuration {} is empty, as after an interrupted write: for the defaults, write a comment into it",
        path.display()
    )]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The file is not valid TOML, or has unknown keys or values.
    #[error("the configuration {} is not valid: {source}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Position and reason.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// Somebody else may write into the directory of drop-ins.
    #[error(
        "{} belongs to the user {owner}: its files would configure the daemon, so it must belong to root, to the owner of {}, or to the \
         daemon's user",
        path.display(), beside.display()
    )]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// The configuration file beside it.
        beside: PathBuf,
    },
    /// Too many drop-ins.
    #[error("{} has {found} files *.toml; at most {DROP_INS_MAX} are read: join some of them", path.display())]
    TooMany {
        /// The directory.
        path: PathBuf,
        /// Number of files.
        found: usize,
    },
    /// A value that this file sets is not usable.
    #[error("{}: {source}", path.display())]
    SetIn {
        /// The file.
        path: PathBuf,
        /// The key and the fault.
        #[source]
        source: Box<ConfigError>,
    },
    /// A number out of range.
    #[error("{key} = {value} is not in {min}..={max}")]
    Range {
        /// Key with its table.
        key: &'static str,
        /// The value found.
        value: u64,
        /// Lower bound.
        min: u64,
        /// Upper bound.
        max: u64,
    },
    /// Unknown user or group.
    #[error(
        "{key} names {name:?}, which is unknown: write users as \"alice\" or 1000, groups as \"@ai\" or \"@100\", everyone as \"*\"; \
         write users and groups that are not in /etc/passwd or /etc/group by number"
    )]
    Who {
        /// Key.
        key: &'static str,
        /// The name found.
        name: String,
    },
    /// A limit of a single user is out of range.
    #[error("limits.users.{name:?}: {source}")]
    UserLimit {
        /// The user, as the configuration names it.
        name: String,
        /// The limit.
        #[source]
        source: OutOfRange,
    },
    /// Limits are set for something that is not a user, or twice for the same one.
    #[error(
        "limits.users names {name:?}, which {why}: write users as \"alice\" or \"1000\"; write users that are not in \
         /etc/passwd by number"
    )]
    User {
        /// The name found.
        name: String,
        /// The fault.
        why: &'static str,
    },
    /// Uids are given to something that is not a user, twice to the same one, or are not fit to be given.
    #[error(
        "policy.subordinates.{name:?}: {why}; write users as \"alice\" or \"1000\", and the first uid and the number of uids that such a \
         user may act for, as in [3000000000, 65536]"
    )]
    Subordinates {
        /// The user, as the configuration names it.
        name: String,
        /// The fault.
        why: SubordinatesFault,
    },
    /// A directory of models cannot be read, at a reload or a check.
    #[error("models: {} cannot be read: {source}; create the directory, or correct its name", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: std::io::Error,
    },
    /// There are models, and none of them can be served, at a reload or a check.
    #[error(
        "models: none of the {found} models in the directories would be served; the first is {}: {reason}. Replace or remove these \
         files, or name another directory",
        path.display()
    )]
    NothingServed {
        /// Number of models.
        found: usize,
        /// The first one's file.
        path: PathBuf,
        /// Why it would not be served.
        reason: String,
    },
    /// A path that is not absolute.
    #[error("{key} must be an absolute path, not {}", path.display())]
    Relative {
        /// Key.
        key: &'static str,
        /// The path found.
        path: PathBuf,
    },
}

/// The fault of an entry of `policy.subordinates`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubordinatesFault {
    /// It names nobody.
    #[error("that is not a user of /etc/passwd, nor a uid")]
    Unknown,
    /// Two entries name one user.
    #[error("another entry names the same user")]
    Twice,
    /// The uids are not free.
    #[error(transparent)]
    Uids(#[from] SubordinatesError),
}

impl ConfigError {
    /// The key with the fault, if a key has it: its tables, then its name.
    pub(super) fn key(&self) -> Option<Vec<&str>> {
        match self {
            Self::Range { key, .. } | Self::Who { key, .. } | Self::Relative { key, .. } => {
                Some(key.split('.').collect())
            }
            Self::UserLimit { name, source } => Some(vec!["limits", "users", name, source.key]),
            Self::Directory { .. } | Self::NothingServed { .. } => Some(vec!["models"]),
            Self::User { name, .. } => Some(vec!["limits", "users", name]),
            Self::Subordinates { name, .. } => Some(vec!["policy", "subordinates", name]),
            _ => None,
        }
    }
}
