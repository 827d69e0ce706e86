//! `cargo xtask check`: everything that must hold before a change lands, in timed stages.
//!
//! A stage that cannot run says why and is listed at the end; with `ROCMFORGE_STRICT=1` it counts as failed. Later
//! stages run even after a failure, so that one run shows all faults.

mod client;
mod comgr;
mod deny;
mod fuzz;
mod kernels;
mod tests;

use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::{boot, daemon, host, interleavings, models, soak};

pub use tests::count;

#[derive(clap::Args)]
pub struct Args {
    /// Run only these stages
    #[arg(long, value_delimiter = ',', value_name = "STAGE")]
    only: Vec<String>,
    /// List the stages and what each does; run nothing
    #[arg(long)]
    list: bool,
}

/// Result of a stage that did not fail.
#[derive(Debug, Default)]
struct Done {
    /// Note for the table: a count or a size.
    note: String,
    /// What was skipped, and why.
    skipped: Vec<String>,
}

impl Done {
    fn note(note: impl Into<String>) -> Self {
        Self { note: note.into(), skipped: Vec::new() }
    }

    fn skipped(why: impl Into<String>) -> Self {
        Self { note: "skipped".into(), skipped: vec![why.into()] }
    }
}

struct Stage {
    name: &'static str,
    about: &'static str,
    run: fn() -> Result<Done>,
}

/// In order: stages that are quick or fail often come first; tests come last, so that their results end the output.
const STAGES: [Stage; 16] = [
    Stage { name: "tools", about: "programs that later stages need; installed if run by root", run: tools },
    Stage { name: "fmt", about: "cargo fmt --check", run: fmt },
    Stage { name: "tidy", about: "layers, rooms, file length, layout: cargo test --test tidy", run: tidy },
    Stage { name: "deny", about: "bans, licences, sources, advisories: cargo deny", run: deny::run },
    Stage {
        name: "clippy",
        about: "cargo clippy of all targets with benches; warnings are errors",
        run: clippy,
    },
    Stage { name: "doc", about: "cargo doc; warnings are errors", run: doc },
    Stage { name: "build", about: "release binaries", run: build },
    Stage {
        name: "client",
        about: "size of the stripped client, and time from its start to its first byte",
        run: client::run,
    },
    Stage {
        name: "boot",
        about: "the package under a real systemd: start, kill, hang, restart, drain, remove",
        run: under_systemd,
    },
    Stage {
        name: "fuzz",
        about: "a short fuzz of untrusted input, with planted faults that must be found",
        run: fuzz::run,
    },
    Stage {
        name: "objects",
        about: "the kept code objects, two targets compiled again, AMD's own reader, the NVIDIA body",
        run: kernels::objects,
    },
    Stage {
        name: "kernels",
        about: "kernel tests on the CPU look-alike: waves of 32 and 64 lanes, sanitizers; launches of each kernel",
        run: kernels::lookalike,
    },
    Stage {
        name: "threads",
        about: "tests in every order of their threads, by a model checker: cargo xtask interleavings",
        run: every_order,
    },
    Stage {
        name: "soak",
        about: "ten seconds of many clients; weights stay while no client is connected (runs beside the tests): cargo xtask soak",
        run: soaked,
    },
    Stage { name: "models", about: "test data: cargo xtask models", run: fetch_models },
    Stage { name: "tests", about: "cargo test of the whole workspace", run: tests::run },
];

enum Verdict {
    Passed(Done),
    Failed(Error),
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    if args.list {
        STAGES.iter().for_each(|stage| println!("{:8} {}", stage.name, stage.about));
        return Ok(());
    }
    if let Some(name) = args.only.iter().find(|name| !STAGES.iter().any(|stage| stage.name == **name)) {
        return Err(Error::UnknownStage { name: name.clone() });
    }
    let mut rows = Vec::new();
    for stage in &STAGES {
        if !args.only.is_empty() && !args.only.iter().any(|name| name == stage.name) {
            continue;
        }
        println!("\n== {}: {}", stage.name, stage.about);
        let started = Instant::now();
        let verdict = match (stage.run)() {
            Ok(done) if host::strict() && !done.skipped.is_empty() => {
                Verdict::Failed(Error::Skipped { what: done.skipped.join("; ") })
            }
            Ok(done) => Verdict::Passed(done),
            Err(error) => Verdict::Failed(error),
        };
        if let Verdict::Failed(error) = &verdict {
            println!("{}: {error}", stage.name);
        }
        rows.push((stage.name, started.elapsed(), verdict));
        host::check_interrupted()?;
    }
    let waited = Instant::now();
    rows.extend(paused().map(|verdict| ("pause", waited.elapsed(), verdict)));
    report(&rows)
}

fn report(rows: &[(&str, Duration, Verdict)]) -> Result<()> {
    println!("\n{:8} {:>8}  {:6}", "stage", "seconds", "");
    for (name, took, verdict) in rows {
        let (state, note) = match verdict {
            Verdict::Passed(done) => ("ok", done.note.as_str()),
            Verdict::Failed(_) => ("FAILED", ""),
        };
        println!("{name:8} {:8.1}  {state:6}  {note}", took.as_secs_f64());
    }
    let all: Duration = rows.iter().map(|(_, took, _)| *took).sum();
    println!("{:8} {:8.1}", "all", all.as_secs_f64());
    let skipped: Vec<&String> = rows
        .iter()
        .filter_map(
            |(_, _, verdict)| if let Verdict::Passed(done) = verdict { Some(&done.skipped) } else { None },
        )
        .flatten()
        .collect();
    if !skipped.is_empty() {
        println!("\nskipped ({}; ROCMFORGE_STRICT=1 makes these failures):", skipped.len());
        skipped.iter().for_each(|why| println!("  {why}"));
    }
    let failed: Vec<&str> =
        rows.iter().filter(|(_, _, v)| matches!(v, Verdict::Failed(_))).map(|(name, _, _)| *name).collect();
    if failed.is_empty() {
        return Ok(());
    }
    Err(Error::Stages { failed: failed.len(), all: rows.len(), names: failed.join(", ") })
}

/// Programs that stages and tests call, with their Debian packages and purposes.
const TOOLS: [(&str, &str, &str); 6] = [
    ("python3", "python3", "the independent decoder of golden frames"),
    ("systemd-analyze", "systemd", "verifying the units"),
    ("kill", "procps", "verifying the units, which call it"),
    ("strip", "binutils", "the size of the client"),
    ("g++", "g++", "libFuzzer"),
    ("groff", "groff-base", "rendering the manual pages"),
];

fn tools() -> Result<Done> {
    let mut done = Done::default();
    for (program, package, what_for) in TOOLS {
        if let Err(error) = host::ensure(program, package) {
            done.skipped.push(format!("{what_for}: {error}"));
        }
    }
    if let Err(error) = models::find_pip() {
        done.skipped.push(format!("fetching models: {error}"));
    }
    for component in ["fmt", "clippy"] {
        if !host::works(host::cargo().args([component, "--version"])) {
            let package = if component == "fmt" { "rustfmt" } else { component };
            host::run(std::process::Command::new("rustup").args(["component", "add", package]))?;
        }
    }
    Ok(done)
}

fn under_systemd() -> Result<Done> {
    match boot::run(&boot::Args::default()) {
        Ok(()) => Ok(Done::default()),
        Err(error @ (Error::Root { .. } | Error::ToolMissing { .. })) => Ok(Done::skipped(error.to_string())),
        Err(error) => Err(error),
    }
}

/// Runs beside the later stages, mostly idle for a minute.
static PAUSE: Mutex<Option<JoinHandle<Result<String>>>> = Mutex::new(None);

/// How long no client is connected; by then idle models have freed everything but their weights.
const PAUSE_TIME: Duration = Duration::from_secs(62);

const SOAK_TIME: Duration = Duration::from_secs(10);

fn soaked() -> Result<Done> {
    let binaries = daemon::build()?;
    let program = binaries.clone();
    let pause = thread::spawn(move || soak::across_sessions(&program, PAUSE_TIME));
    PAUSE.lock().unwrap_or_else(PoisonError::into_inner).replace(pause);
    soak::soak(&binaries, SOAK_TIME, 16, 1).map(Done::note)
}

/// Result of the pause, if it was started.
fn paused() -> Option<Verdict> {
    let pause = PAUSE.lock().unwrap_or_else(PoisonError::into_inner).take()?;
    let failed = |_| Error::Unexpected { what: "the pause", text: "it panicked".into() };
    Some(match pause.join().map_err(failed).flatten() {
        Ok(note) => Verdict::Passed(Done::note(note)),
        Err(error @ Error::ToolMissing { .. }) if !host::strict() => {
            Verdict::Passed(Done::skipped(error.to_string()))
        }
        Err(error) => {
            println!("pause: {error}");
            Verdict::Failed(error)
        }
    })
}

fn every_order() -> Result<Done> {
    interleavings::run(&interleavings::Args::default()).map(Done::note)
}

fn fmt() -> Result<Done> {
    host::run(host::cargo().args(["fmt", "--all", "--check"]))?;
    Ok(Done::default())
}

fn tidy() -> Result<Done> {
    host::run(host::cargo().args(["test", "--quiet", "--workspace", "--test", "tidy"]))?;
    Ok(Done::default())
}

fn clippy() -> Result<Done> {
    host::run(host::cargo().args([
        "clippy",
        "--quiet",
        "--workspace",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ]))?;
    Ok(Done::default())
}

fn doc() -> Result<Done> {
    let mut command = host::cargo();
    command.env("RUSTDOCFLAGS", "-D warnings").args(["doc", "--quiet", "--workspace", "--no-deps"]);
    host::run(&mut command)?;
    Ok(Done::default())
}

fn build() -> Result<Done> {
    host::build_release()?;
    Ok(Done::default())
}

fn fetch_models() -> Result<Done> {
    match models::ensure_default() {
        Ok(()) => Ok(Done::default()),
        Err(Error::Interrupted) => Err(Error::Interrupted),
        Err(error) => Ok(Done::skipped(format!("models: {error}"))),
    }
}
