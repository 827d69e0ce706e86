//! `cargo xtask mutants`: changes the parser of model files and the frame decoder, which read untrusted bytes, line
//! by line until a test fails. A change that no test notices is a check without a test.
//!
//! cargo-mutants makes and runs the changes, in separate packages below the target directory. Each package holds a
//! part of the project and its tests, and builds in seconds; the daemon takes a minute.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, Rlimit};

use crate::error::{Error, Result};
use crate::host;

mod parts;

use parts::{PARTS, Part};

/// The version that the command was written for.
const TOOL: &str = "cargo-mutants@27.1.0";

/// cargo-mutants' exit code if tests of some changes timed out and no change passed.
const TIMEOUTS: i32 = 3;

/// Most bytes of a process's own memory, because a changed loop may allocate without end. The compiler needs less
/// than 1 GiB here, the tests 300 MiB.
const DATA_BYTES_MAX: u64 = 4 << 30;

#[derive(clap::Args)]
pub struct Args {
    /// Only this part
    #[arg(value_parser = ["parser", "wire"])]
    part: Option<String>,
    /// Only changes of files whose path matches this
    #[arg(long, value_name = "GLOB")]
    file: Option<String>,
    /// Only changes whose line in `--list` matches this
    #[arg(long, value_name = "REGEX")]
    change: Option<String>,
    /// Changes tried in parallel
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// List the changes and try none
    #[arg(long)]
    list: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    if !host::works(host::cargo().args(["mutants", "--version"])) {
        host::install_crate(TOOL)?;
    }
    let limit = Rlimit { current: Some(DATA_BYTES_MAX), maximum: Some(DATA_BYTES_MAX) };
    rustix::process::setrlimit(Resource::Data, limit)
        .map_err(|error| Error::io("limit of memory")(error.into()))?;
    let wanted = PARTS.iter().filter(|part| args.part.as_ref().is_none_or(|name| name == part.name));
    let tried: Vec<Result<()>> = wanted
        .map(|part| {
            println!("{}:", part.name);
            try_changes(part, args)
        })
        .collect();
    tried.into_iter().collect()
}

fn try_changes(part: &Part, args: &Args) -> Result<()> {
    let package = host::target_dir().join("mutants").join(part.name);
    write_package(part, &package)?;
    let mut command = host::cargo();
    command.current_dir(&package).args(["mutants", "--no-shuffle", "--colors", "never"]);
    command.arg("--file").arg(args.file.as_deref().unwrap_or(part.changed));
    command.args(args.change.iter().flat_map(|regex| ["--re", regex]));
    command.args(part.same.iter().flat_map(|(regex, _)| ["--exclude-re", regex]));
    if args.list {
        return host::run(command.arg("--list"));
    }
    // Endless loops are noticed too: the limit is five times the tests' duration, at least 60 s, because other
    // programs may run.
    command.args(["--minimum-test-timeout", "60", "--jobs", &args.jobs.to_string()]);
    match host::run(&mut command) {
        // This exit code means that tests of some changes timed out, so they were noticed.
        Err(Error::Command { status, .. }) if status.code() == Some(TIMEOUTS) => Ok(()),
        result => result,
    }
}

fn write_package(part: &Part, package: &Path) -> Result<()> {
    for path in part.copied.iter().chain(part.written.iter().map(|(path, _)| path)) {
        let old = package.join(path);
        if old.is_dir() {
            fs::remove_dir_all(&old).map_err(Error::at(&old))?;
        }
    }
    for path in part.copied {
        copy(&host::root().join(path), &package.join(path))?;
    }
    copy(&host::root().join("Cargo.lock"), &package.join("Cargo.lock"))?;
    for (path, text) in part.written {
        let to = package.join(path);
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder).map_err(Error::at(folder))?;
        }
        fs::write(&to, text).map_err(Error::at(&to))?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if from.is_dir() {
        for entry in fs::read_dir(from).map_err(Error::at(from))? {
            let entry = entry.map_err(Error::at(from))?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).map_err(Error::at(folder))?;
    }
    fs::copy(from, to).map_err(Error::at(from))?;
    Ok(())
}
