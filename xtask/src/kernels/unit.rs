//! Compiling many small files: as many at a time as there are processors, and none whose inputs are what they were.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::host;

/// One output and the commands that make it, run one after the other.
pub struct Unit {
    pub output: PathBuf,
    /// The first writes a list of what it read to its place: see [`list_path`].
    pub commands: Vec<Command>,
    /// What the commands do not show and the output depends on: the compiler's version.
    pub salt: String,
    /// Whether it may fail without a word: a trial.
    pub is_trial: bool,
}

/// Where the first command says which files it read, in make's format.
pub fn list_path(output: &Path) -> PathBuf {
    with_ending(output, "d")
}

/// Makes every output that is not up to date.
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
                        // The first one counts; the others stop.
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
    // Whatever happens from here on, what lies there is not up to date.
    let _ = fs::remove_file(key_path(unit));
    for command in &mut unit.commands {
        run(command, unit.is_trial)?;
    }
    let key = key(unit).ok_or_else(|| Error::Unexpected {
        what: "the compiler",
        text: format!("no list of what {} was made from", unit.output.display()),
    })?;
    let path = key_path(unit);
    fs::write(&path, key).map_err(Error::at(&path))
}

/// Runs a compiler; what it says is shown when it fails, but for a trial.
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

/// Digest of the commands and of every file that the output was made from; `None` when that is not known.
fn key(unit: &Unit) -> Option<String> {
    let mut hash = Sha256::new();
    hash.update(&unit.salt);
    for command in &unit.commands {
        hash.update(host::shown(command));
        hash.update([0]);
    }
    for file in files_of(&unit.output)? {
        hash.update(fs::read(file).ok()?);
        hash.update([0]);
    }
    Some(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The files that `output` was made from; `None` when that is not known.
pub fn files_of(output: &Path) -> Option<Vec<PathBuf>> {
    let list = fs::read_to_string(list_path(output)).ok()?;
    // make's format: `output: file file \`, without spaces in our names.
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
