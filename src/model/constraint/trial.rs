//! A trial of a constraint in a process of its own, before the daemon compiles it.
//!
//! The compiler bounds most of what it does, but not all. In a row of 30,000 optional parts (`a?a?a?...`, 60 KB) it kept 3.5 GB, and
//! nothing stops a thread. A process can be stopped. A form that it compiles within its bounds takes no more in the daemon: the same
//! code does the same again, with a larger vocabulary.

use std::io::{self, Read};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use rustix::process::{Resource, Signal};
use serde::{Deserialize, Serialize};

use super::{COMPILE_STACK, COMPILE_TIME_MAX, ConstraintError, ConstraintKind, ConstraintSource};
use super::{NICENESS, SOURCE_BYTES_MAX, factory_of, parsed};
use crate::model::template::child::confine;
use crate::model::template::renderer::{Ended, Process};

/// First argument that makes `rocmforged` call [`child_main`].
pub const SUBCOMMAND: &str = "try-constraint";

/// Processor time of the process, in seconds. The daemon then compiles as long again.
const CPU_SECONDS_MAX: u64 = 3;

/// Memory of the process in MiB, beyond its stack. A copy of what was compiled belongs to each answer.
const MEMORY_MIB_MAX: u64 = 96;

/// Bytes of JSON that a text takes at most, and some for the rest.
const REQUEST_BYTES_MAX: u64 = 6 * SOURCE_BYTES_MAX as u64 + 1024;

/// A constraint on its way to the process.
#[derive(Serialize, Deserialize)]
struct Request<T> {
    kind: ConstraintKind,
    text: T,
}

/// Tries constraints in processes of a program.
#[derive(Clone, Debug)]
pub struct Trial {
    program: PathBuf,
}

impl Trial {
    /// Trials by `program`, a `rocmforged`.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self { program: program.into() }
    }

    /// Compiles a constraint for a tiny vocabulary, in a process that it ends in time. Takes some 10 ms more than that. One that
    /// cannot be used passes: the caller finds out why.
    ///
    /// # Errors
    /// [`ConstraintError::TooComplex`], [`ConstraintError::TooSlow`], [`ConstraintError::NoThread`] if no process starts,
    /// [`ConstraintError::Internal`].
    pub(super) fn run(&self, source: &ConstraintSource) -> Result<(), ConstraintError> {
        let kind = source.kind;
        let internal = |error: String| ConstraintError::Internal(format!("its trial: {error}"));
        let request = serde_json::to_vec(&Request { kind, text: &*source.text });
        let request = request.map_err(|error| internal(error.to_string()))?;
        let process = |error: crate::model::template::TemplateError| internal(error.to_string());
        let started = Process::start(&self.program, SUBCOMMAND);
        let mut child =
            started.map_err(|error| ConstraintError::NoThread { kind, reason: error.to_string() })?;
        let outcome = child.talk(&request, Instant::now() + COMPILE_TIME_MAX);
        let status = child.end(outcome.is_ok()).map_err(process)?;
        let too_slow = |seconds| ConstraintError::TooSlow { kind, seconds };
        match outcome.map_err(process)? {
            Ended::Itself if status.success() => Ok(()),
            Ended::Deadline => Err(too_slow(COMPILE_TIME_MAX.as_secs())),
            Ended::Itself | Ended::OutputTooLong => {
                use std::os::unix::process::ExitStatusExt;
                let stopped = [Signal::XCPU, Signal::KILL].map(|signal| Some(signal.as_raw()));
                let died = [Signal::ABORT, Signal::SEGV, Signal::BUS].map(|signal| Some(signal.as_raw()));
                let told = String::from_utf8_lossy(&child.stderr);
                match status.signal() {
                    signal if stopped.contains(&signal) => Err(too_slow(CPU_SECONDS_MAX)),
                    signal if died.contains(&signal) => {
                        let reason = format!("it takes more than {MEMORY_MIB_MAX} MiB, or nests too deep");
                        Err(ConstraintError::TooComplex { kind, reason })
                    }
                    _ => Err(internal(format!("{status}: {}", super::short(&told)))),
                }
            }
        }
    }
}

/// Compiles the constraint on standard input. For the subcommand [`SUBCOMMAND`] only: it permanently limits memory, files and time.
pub fn child_main() -> ExitCode {
    // As for the daemon's thread that compiles. Without it the trial is only a worse neighbour.
    let _ = rustix::process::nice(NICENESS);
    // Before the limits, which allow no thread.
    let thread = std::thread::Builder::new().stack_size(COMPILE_STACK).spawn(|| {
        let memory = COMPILE_STACK as u64 + (MEMORY_MIB_MAX << 20);
        confine(CPU_SECONDS_MAX, (Resource::Data, memory)).map_err(io::Error::from)?;
        let mut request = Vec::new();
        io::stdin().lock().take(REQUEST_BYTES_MAX).read_to_end(&mut request)?;
        let Request { kind, text } = serde_json::from_slice::<Request<String>>(&request)?;
        let words: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).chain([Vec::new()]).collect();
        let factory = factory_of(&words, 256, &[256]).map_err(io::Error::other)?;
        // The daemon tells what is wrong with one that cannot be used.
        let _ = parsed(&factory, &ConstraintSource { kind, text });
        Ok::<(), io::Error>(())
    });
    match thread.map(std::thread::JoinHandle::join) {
        Ok(Ok(Ok(()))) => ExitCode::SUCCESS,
        Ok(Ok(Err(error))) | Err(error) => {
            use std::io::Write;
            let _ = writeln!(io::stderr(), "{error}");
            ExitCode::FAILURE
        }
        // A panic of the compiler, which the daemon meets in its turn and tells.
        Ok(Err(_)) => ExitCode::SUCCESS,
    }
}
