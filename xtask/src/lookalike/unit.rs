//! Compiles many small files in parallel, one per processor, and skips files whose inputs did not change.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use sha2::{Digest, Sha256};

use super::sources;
use crate::error::{Error, Result};
use crate::host;

/// An output and the commands that make it, run one after the other.
pub struct Unit {
    pub output: PathBuf,
    /// The first command writes the list of the files it read to [`list_path`].
    pub commands: Vec<Command>,
    /// Other inputs that affect the output, such as the compiler's version.
    pub salt: String,
    /// Whether errors are hidden, because this is a trial.
    pub is_trial: bool,
}

/// File for the list of files that the first command read, in make's format.
pub fn list_path(output: &Path) -> PathBuf {
    with_ending(output, "d")
}

/// Makes every output that is out of date.
pub fn build(mut units: Vec<Unit>) -> Result<()> {
    units.retain(|unit| !is_fresh(unit));
    let next = AtomicUsize::new(0);
    let units: Vec<Mutex<Unit>> = units.into_iter().map(Mutex::new).collect();
    let first_error = Mutex::new(None);
    let workers = thread::available_parallelism().map_or(1, usize::from).min(units.len());
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(unit) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let Ok(mut unit) = unit.lock() else { return };
                    if let Err(error) = make(&mut unit) {
                        // The first error counts; the other workers stop.
                        next.store(units.len(), Ordering::Relaxed);
                        if let Ok(mut first) = first_error.lock() {
                            first.get_or_insert(error);
                        }
                    }
                }
            });
        }
    });
    match first_error.into_inner() {
        Ok(Some(error)) => Err(error),
        _ => Ok(()),
    }
}

fn make(unit: &mut Unit) -> Result<()> {
    host::check_interrupted()?;
    // From here on, the existing output does not count as up to date.
    let _ = fs::remove_file(key_path(unit));
    for command in &mut unit.commands {
        run(command, unit.is_trial)?;
    }
    let key = key(unit).ok_or_else(|| Error::Unexpected {
        what: "the compiler",
        text: format!("it wrote no list of the inputs of {}", unit.output.display()),
    })?;
    let path = key_path(unit);
    fs::write(&path, key).map_err(Error::at(&path))
}

/// Runs a compiler; shows its error output if it fails, except in a trial.
fn run(command: &mut Command, is_trial: bool) -> Result<()> {
    let shown = host::shown(command);
    let output = command.stdin(Stdio::null()).output().map_err(Error::io(shown.clone()))?;
    host::check_interrupted()?;
    if output.status.success() {
        return Ok(());
    }
    if !is_trial {
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
    }
    Err(Error::Command { command: shown, status: output.status })
}

fn is_fresh(unit: &Unit) -> bool {
    unit.output.is_file()
        && fs::read_to_string(key_path(unit)).is_ok_and(|old| key(unit).is_some_and(|now| now == old))
}

/// Digest of the commands and of the code in every input file; `None` if the inputs are unknown.
fn key(unit: &Unit) -> Option<String> {
    let mut hash = Sha256::new();
    hash.update(&unit.salt);
    for command in &unit.commands {
        hash.update(host::shown(command));
        hash.update([0]);
    }
    for file in files_of(&unit.output)? {
        hash.update(sources::without_comments(&fs::read_to_string(file).ok()?));
        hash.update([0]);
    }
    Some(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The input files of `output`; `None` if they are unknown.
pub fn files_of(output: &Path) -> Option<Vec<PathBuf>> {
    let list = fs::read_to_string(list_path(output)).ok()?;
    // make's format: `output: file file \`; our names have no spaces.
    let (_, files) = list.split_once(':')?;
    Some(files.split_whitespace().filter(|word| *word != "\\").map(PathBuf::from).collect())
}

fn key_path(unit: &Unit) -> PathBuf {
    with_ending(&unit.output, "key")
}

fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(ending);
    name.into()
}
