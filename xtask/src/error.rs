//! Why a project command failed.

use std::path::{Path, PathBuf};
use std::process::ExitStatus;

/// Why a project command failed. The text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{what}: {source}")]
    Io {
        what: String,
        #[source]
        source: std::io::Error,
    },
    #[error("{command} ended with {status}")]
    Command { command: String, status: ExitStatus },
    #[error("{program} is missing; install it (Debian package {package}) and run this again")]
    ToolMissing { program: String, package: &'static str },
    #[error("{file}: sha256 {found} where {want} was expected; nothing was kept")]
    Hash { file: String, found: String, want: String },
    #[error("{file} holds no {member}")]
    Member { file: String, member: String },
    #[error("no item is called {name:?}; `cargo xtask models --list` shows them")]
    UnknownItem { name: String },
    #[error("less than {need_mib} MiB are free on the disk of {}", dir.display())]
    DiskFull { dir: PathBuf, need_mib: u64 },
    #[error("{what} said something that was not expected: {text}")]
    Unexpected { what: &'static str, text: String },
    #[error("the daemon did not answer within {seconds} s; its log:\n{log}")]
    DaemonSilent { seconds: u64, log: String },
    #[error("the daemon ended with {status}; its log:\n{log}")]
    DaemonEnded { status: ExitStatus, log: String },
    #[error("{failed} of {all} stages failed: {names}")]
    Stages { failed: usize, all: usize, names: String },
    #[error("no stage is called {name:?}; `cargo xtask check --list` shows them")]
    UnknownStage { name: String },
    #[error("{what} needs root")]
    Root { what: &'static str },
    #[error("may not be skipped here: {what}")]
    Skipped { what: String },
    #[error("{} has {bytes} bytes, at most {max} are allowed", file.display())]
    TooLarge { file: PathBuf, bytes: u64, max: u64 },
    #[error("{what} cannot be had: {why}")]
    Unavailable { what: &'static str, why: String },
    #[error("no target is called {name:?}; there are {known}")]
    UnknownTarget { name: String, known: String },
    #[error("kernels that may not be shipped:\n  {faults}")]
    Gates { faults: String },
    #[error("{} is stale: {what}; run `cargo xtask kernels` and keep the result", file.display())]
    Stale { file: PathBuf, what: String },
    #[error("changes that no test notices:\n  {changes}")]
    Survived { changes: String },
    #[error("no test launches {kernels}")]
    Untested { kernels: String },
    #[error("no GPU that works was found")]
    NoGpu,
    #[error("{failed} parts failed; {} says what they printed", report.display())]
    Parts { failed: usize, report: PathBuf },
    #[error("the daemon is not as it was (seed {seed}):\n  {faults}")]
    Soaked { seed: u64, faults: String },
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    /// What the process ends with: 130 after an interrupt as shells have it, 3 where there is no GPU, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Interrupted => 130,
            Self::NoGpu => 3,
            _ => 1,
        }
    }

    /// For `map_err`: an I/O error of doing `what`.
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }

    /// For `map_err`: an I/O error on `path`.
    pub fn at(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        Self::io(path.display().to_string())
    }
}

/// What every project command returns.
pub type Result<T> = std::result::Result<T, Error>;
