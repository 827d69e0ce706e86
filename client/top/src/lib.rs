//! A terminal view of the `rocmforged` daemon: device memory, resident parts of each model, running and waiting
//! requests.
//!
//! It is a separate program, so that `rocmforge-client` needs no terminal library, and it asks the daemon through
//! that library alone. `watch` asks the daemon in its own threads. [`App`] holds the samples and the keys' settings.
//! [`view`] draws them into lines. Names come from other users: every name passes `text::printable`.

mod app;
mod arguments;
mod bar;
mod once;
mod sample;
mod screen;
mod text;
pub mod view;
mod watch;

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use clap::Parser;
use rocmforge_client::ClientError;

pub use app::{App, Happening, Sort};
pub use arguments::{Arguments, command};
pub use sample::{Rates, Sample};
pub use screen::Screen;

/// The daemon cannot be reached or is not trusted.
const EXIT_UNAVAILABLE: u8 = 3;
/// The request failed, or the output cannot be written.
const EXIT_FAILED: u8 = 1;
/// The arguments are invalid.
const EXIT_USAGE: u8 = 2;
/// 128 and the signal's number, as a shell reports it.
const EXIT_SIGNAL: u8 = 128;

/// Why the program ends with an error.
#[derive(Debug)]
pub enum Failure {
    /// The daemon refused or did not answer.
    Client(Box<ClientError>),
    /// The terminal or the output failed.
    Output(io::Error),
    /// The system gave this process no thread.
    Thread(io::Error),
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        Self::Client(Box::new(error))
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

impl Failure {
    fn exit_code(&self) -> u8 {
        match self {
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => 0,
            Self::Output(_) | Self::Thread(_) => EXIT_FAILED,
            Self::Client(error) => match **error {
                ClientError::SocketPath { .. } => EXIT_USAGE,
                ClientError::PermissionDenied { .. }
                | ClientError::UntrustedServer { .. }
                | ClientError::UnsupportedVersion { .. }
                | ClientError::Refused { .. }
                | ClientError::CannotAct
                | ClientError::Timeout { .. } => EXIT_UNAVAILABLE,
                _ if error.is_unreachable() => EXIT_UNAVAILABLE,
                _ => EXIT_FAILED,
            },
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Client(error) => {
                write!(f, "{}: {}", error.code_name(), text::printable(&error.to_string()))
            }
            Self::Output(error) => write!(f, "output: {error}"),
            Self::Thread(error) => write!(
                f,
                "no thread could be started: {error}; `ulimit -u` shows how many processes and threads you may have"
            ),
        }
    }
}

/// The whole program; `--help` documents the exit codes.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    ExitCode::from(run(arguments))
}

/// As [`main`], with the exit code as a number. Exits the process if the arguments are invalid or ask for help.
pub fn run(arguments: impl Iterator<Item = OsString>) -> u8 {
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => error.exit(),
    };
    let done = if arguments.json {
        once::json_lines(&arguments, &mut io::stdout().lock())
    } else if arguments.once || !io::stdout().is_terminal() {
        once::frame(&arguments, &mut io::stdout().lock())
    } else {
        screen::run(&arguments)
    };
    match done {
        Ok(signal) => signal.map_or(0, |signal| EXIT_SIGNAL + signal),
        Err(failure) => {
            let code = failure.exit_code();
            if code != 0 {
                // If even standard error cannot be written, the exit code must do.
                let _ = writeln!(io::stderr(), "rocmforge-top: {failure}");
            }
            code
        }
    }
}

/// Prints the frame of `--once`, for a caller that has the connection's options.
///
/// # Errors
/// Errors of the daemon and of `out`.
pub fn frame_of(arguments: &Arguments, out: &mut dyn Write) -> Result<(), Failure> {
    once::frame(arguments, out).map(|_| ())
}

/// Prints the output of `--json`.
///
/// # Errors
/// Errors of the daemon and of `out`.
pub fn json_of(arguments: &Arguments, out: &mut dyn Write) -> Result<(), Failure> {
    once::json_lines(arguments, out).map(|_| ())
}

#[cfg(test)]
mod tests;
