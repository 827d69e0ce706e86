//! Commands that need the library or heavy crates are in the package `lab`, which takes minutes to build.
//!
//! So `cargo xtask demo` needs none of it. `cargo xtask` hands such a command on, with the same words.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::error::{Error, Result};
use crate::host;

/// Words of a command of the lab.
#[derive(clap::Args)]
pub struct Args {
    /// Its arguments; `--help` lists them
    #[arg(allow_hyphen_values = true, trailing_var_arg = true, value_name = "ARGUMENTS")]
    words: Vec<OsString>,
}

/// Becomes the lab's command `name`; its exit code is ours.
///
/// # Errors
/// [`Error::Command`] if it cannot be built.
pub fn hand_on(name: &str, args: &Args) -> Result<()> {
    Err(Error::io("lab")(program()?.arg(name).args(&args.words).exec()))
}

/// Runs a command of the lab to its end.
///
/// # Errors
/// [`Error::Command`], [`Error::Interrupted`].
pub fn run(words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<()> {
    host::run(program()?.args(words))
}

/// As [`run`], for a command whose own output is for programs: that of the lab goes to standard error.
///
/// # Errors
/// As [`run`].
pub fn run_aside(words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<()> {
    host::run(program()?.args(words).stdout(std::io::stderr()))
}

/// Builds the lab.
fn program() -> Result<Command> {
    host::build_tested(&["--bin", "lab"])?;
    Ok(Command::new(host::target_dir().join("debug/lab")))
}
