//! Errors of the project commands.

use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};

/// Error of a project command. The text says what to do.
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
    #[error(
        "{what} needs {programs}, which this machine lacks; on Debian and Ubuntu, `sudo apt install {packages}` and run this again"
    )]
    ToolsMissing { what: &'static str, programs: String, packages: String },
    #[error("{file}: sha256 is {found}, expected {want}; the file was discarded")]
    Hash { file: String, found: String, want: String },
    #[error("{file} does not contain {member}")]
    Member { file: String, member: String },
    #[error("there is no item {name:?}; `cargo xtask models --list` shows all items")]
    UnknownItem { name: String },
    #[error("the disk of {} has less than {need_mib} MiB free", dir.display())]
    DiskFull { dir: PathBuf, need_mib: u64 },
    #[error("{what} is not as expected: {text}")]
    Unexpected { what: &'static str, text: String },
    #[error("tests run too few lines of: {parts}; `--missing PATH` lists the lines")]
    Uncovered { parts: String },
    #[error("the daemon did not answer within {seconds} s; its log:\n{log}")]
    DaemonSilent { seconds: u64, log: String },
    #[error("the daemon ended with {status}; its log:\n{log}")]
    DaemonEnded { status: ExitStatus, log: String },
    #[error("{failed} of {all} stages failed: {names}")]
    Stages { failed: usize, all: usize, names: String },
    #[error("there is no stage {name:?}; `cargo xtask check --list` shows all stages")]
    UnknownStage { name: String },
    #[error("{what} needs root")]
    Root { what: &'static str },
    #[error("skipped, but ROCMFORGE_STRICT=1 forbids it: {what}")]
    Skipped { what: String },
    #[error("{} has {bytes} bytes; at most {max} are allowed", file.display())]
    TooLarge { file: PathBuf, bytes: u64, max: u64 },
    #[error("{what} is not available: {why}")]
    Unavailable { what: &'static str, why: String },
    #[error("there is no target {name:?}; known targets: {known}")]
    UnknownTarget { name: String, known: String },
    #[error("these kernels must not be shipped:\n  {faults}")]
    Gates { faults: String },
    #[error("{} is stale: {what}; run `cargo xtask kernels` and commit the result", file.display())]
    Stale { file: PathBuf, what: String },
    #[error("no test notices these changes:\n  {changes}")]
    Survived { changes: String },
    #[error("no test launches {kernels}")]
    Untested { kernels: String },
    #[error("no GPU that works was found")]
    NoGpu,
    #[error("{failed} parts failed; {} has their output", report.display())]
    Parts { failed: usize, report: PathBuf },
    #[error("the daemon changed during the soak (seed {seed}):\n  {faults}")]
    Soaked { seed: u64, faults: String },
    #[error("one user changed too much for the others:\n  {faults}")]
    Attacked { faults: String },
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    /// Exit code: 130 after an interrupt, as in shells; 3 if there is no GPU; else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Interrupted => 130,
            Self::NoGpu => 3,
            _ => 1,
        }
    }

    /// For `map_err`: makes an I/O error of the action `what`.
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }

    /// For `map_err`: makes an I/O error of `path`.
    pub fn at(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        Self::io(path.display().to_string())
    }
}

/// Result of project commands.
pub type Result<T> = std::result::Result<T, Error>;

/// A program's main: watches for interrupts, runs `command`, shows its error and turns it into the exit code.
pub fn exit(command: impl FnOnce() -> Result<()>) -> ExitCode {
    match crate::host::watch_interrupts().and_then(|()| command()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
