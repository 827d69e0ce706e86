//! `cargo xtask check`: everything that must hold before a change lands, in timed stages.
//!
//! A stage that cannot run says why and is listed at the end; with `ROCMFORGE_STRICT=1` it counts as failed. Later
//! stages run even after a failure, so that one run shows all faults. The long form (`--long`) adds what is slow, or
//! what another stage nearly says; the last line of the short form names it.

mod arm;
mod client;
mod deny;
mod fuzz;
mod image;
mod kernels;
mod packages;
mod schedules;
mod tests;

use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::host::Programs;
use crate::{boot, host, interleavings, lab, models};

pub use tests::count;

#[derive(clap::Args)]
pub struct Args {
    /// Run only these stages
    #[arg(long, value_delimiter = ',', value_name = "STAGE")]
    only: Vec<String>,
    /// Run the long form, too: release programs, fuzzing, sanitizers, code objects compiled again
    #[arg(long)]
    long: bool,
    /// List the stages and what each does; run nothing
    #[arg(long)]
    list: bool,
}

/// How much a stage does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Short,
    Long,
}

/// Result of a stage that did not fail.
#[derive(Debug, Default, serde::Deserialize, serde::Serialize)]
pub struct Done {
    /// Note for the table: a count or a size.
    pub note: String,
    /// The tests that were skipped, and why.
    pub skipped: Vec<String>,
}

impl Done {
    pub fn note(note: impl Into<String>) -> Self {
        Self { note: note.into(), skipped: Vec::new() }
    }

    pub fn skipped(why: impl Into<String>) -> Self {
        Self { note: "skipped".into(), skipped: vec![why.into()] }
    }

    /// Writes it, for the check to read from the lab's process.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_vec(self)
            .map_err(|error| Error::Unexpected { what: "serde_json", text: error.to_string() })?;
        std::fs::write(path, text).map_err(Error::at(path))
    }
}

struct Stage {
    name: &'static str,
    about: &'static str,
    /// The work of the long form alone; empty if both forms do the same.
    long: &'static str,
    run: fn(Form) -> Result<Done>,
    beside: Beside,
}

/// Whether a stage runs beside the stages after it. Such a stage mostly waits: it would leave processors idle.
#[derive(PartialEq)]
enum Beside {
    No,
    /// Until this stage, which needs it.
    Until(&'static str),
    ToTheEnd,
}

impl Stage {
    const fn new(name: &'static str, run: fn(Form) -> Result<Done>, about: &'static str) -> Self {
        Self { name, about, long: "", run, beside: Beside::No }
    }

    /// A stage of the long form alone.
    const fn only_long(name: &'static str, run: fn(Form) -> Result<Done>, about: &'static str) -> Self {
        Self { name, about: "", long: about, run, beside: Beside::No }
    }

    const fn long(self, long: &'static str) -> Self {
        Self { long, ..self }
    }

    const fn beside(self, beside: Beside) -> Self {
        Self { beside, ..self }
    }

    /// Its work in this form.
    fn says(&self, form: Form) -> String {
        let parts = [self.about, if form == Form::Long { self.long } else { "" }];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; ")
    }
}

/// In order: stages that are quick or fail often come first; tests come last, so that their results end the output.
const STAGES: [Stage; 26] = [
    Stage::new("tools", |_| tools(), "programs that later stages need; installed if run by root"),
    Stage::new("models", |_| fetch_models(), "test data, fetched beside other stages: cargo xtask models")
        .beside(Beside::Until("tests")),
    Stage::new("root", |_| boot_root(), "the small Debian that boot needs, made beside other stages")
        .beside(Beside::Until("boot")),
    Stage::new("fmt", |_| fmt(), "cargo fmt --check"),
    Stage::new("tidy", |_| tidy(), "layers, rooms, file length, layout: cargo tidy"),
    Stage::new("deny", |_| deny::run(), "bans, licences, sources, advisories: cargo deny"),
    Stage::new("clippy", |_| clippy(), "cargo clippy of all targets with benches; warnings are errors"),
    Stage::new("doc", |_| doc(), "cargo doc; warnings are errors"),
    // All in one build: the library and its tests are the longest units, one for each of two processors.
    Stage::new("compile", |_| compile(), "programs and tests that later stages run"),
    Stage::only_long("build", |_| build(), "release programs"),
    Stage::only_long(
        "client",
        |_| client::run(),
        "size of the stripped client, and time from its start to its first byte",
    ),
    Stage::only_long(
        "packages",
        |_| packages::run(),
        "tar archive, Debian and RPM packages of the release programs; lintian, rpm and the programs' versions",
    ),
    Stage::only_long(
        "image",
        |_| or_skipped(image::run()),
        "the recipe's container image, by the recipe's own commands: built, asked, stopped, started again",
    ),
    Stage::new(
        "pause",
        |form| stage("pause", form),
        "weights stay while no client is connected, beside other stages",
    )
    .beside(Beside::ToTheEnd),
    Stage::new(
        "boot",
        under_systemd,
        "the package under a real systemd: start, kill, hang, restart, drain, remove",
    )
    .long("with release programs")
    .beside(Beside::Until("threads")),
    Stage::only_long(
        "fuzz",
        |_| fuzz::run(),
        "a short fuzz of untrusted input, with planted faults that must be found",
    ),
    Stage::only_long(
        "schedules",
        |_| schedules::run(),
        "100,000 random schedules of requests; the tests stage has 10,000",
    ),
    Stage::new("objects", |form| stage("objects", form), "the kept code objects, AMD's own reader")
        .long("two targets compiled again, the NVIDIA body"),
    Stage::new(
        "kernels",
        kernels::run,
        "kernel tests on the CPU look-alike with waves of 64 lanes; launches of each kernel",
    )
    .long("waves of 32 lanes, sanitizers, no matrix unit, the GPU owners' report"),
    Stage::new("soak", |form| stage("soak", form), "ten seconds of many clients: cargo xtask soak")
        .beside(Beside::Until("tests")),
    Stage::new(
        "threads",
        |_| every_order(),
        "tests in every order of their threads, by a model checker: cargo xtask interleavings",
    ),
    Stage::only_long(
        "arm",
        |_| arm::run(),
        "the CPU backend's tests as a 64-bit ARM program, under an emulator",
    ),
    Stage::only_long(
        "lengths",
        |_| tests::lengths(),
        "every architecture on the look-alike with a half-precision cache, for all lengths",
    ),
    Stage::only_long(
        "clients",
        |_| tests::clients(),
        "LangChain, LiteLLM and its proxy, LlamaIndex, aider, agents and Node packages before the gateway",
    ),
    Stage::only_long(
        "schemas",
        |_| tests::schemas(),
        "a real model answers by JSON-Schema-Test-Suite and BFCL's functions; a table of valid answers and refusals",
    ),
    Stage::new(
        "tests",
        |_| tests::run(),
        "cargo test of the whole workspace, kernels with waves of 32 lanes",
    ),
];

/// A stage that runs beside the others.
type Running = JoinHandle<(Duration, Result<Done>)>;

/// A line of the table: the stage, its time, its verdict.
type Row = (&'static str, Duration, Verdict);

enum Verdict {
    Passed(Done),
    Failed(Error),
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let begun = Instant::now();
    if args.list {
        STAGES.iter().for_each(list);
        return Ok(());
    }
    if let Some(name) = args.only.iter().find(|name| !STAGES.iter().any(|stage| stage.name == **name)) {
        return Err(Error::UnknownStage { name: name.clone() });
    }
    let form = if args.long { Form::Long } else { Form::Short };
    let named = |stage: &Stage| args.only.iter().any(|name| name == stage.name);
    // A stage of the long form also runs if it is named.
    let wanted = |stage: &&Stage| {
        if args.only.is_empty() { args.long || !stage.about.is_empty() } else { named(stage) }
    };
    let mut rows = Vec::new();
    let mut beside: Vec<(&Stage, Running)> = Vec::new();
    for stage in STAGES.iter().filter(wanted) {
        let (due, later) =
            beside.into_iter().partition(|(other, _)| other.beside == Beside::Until(stage.name));
        beside = later;
        rows.extend(due.into_iter().map(joined));
        let form = if stage.about.is_empty() { Form::Long } else { form };
        println!("\n== {}: {}", stage.name, stage.says(form));
        if stage.beside == Beside::No {
            let (took, done) = timed(stage.run, form);
            rows.push((stage.name, took, judged(stage.name, done)));
        } else {
            beside.push((stage, thread::spawn(move || timed(stage.run, form))));
        }
        host::check_interrupted()?;
    }
    rows.extend(beside.into_iter().map(joined));
    let reported = report(&rows, begun.elapsed());
    if form == Form::Short && args.only.is_empty() {
        println!("\nnot run; `cargo xtask check --long` adds:");
        let left_out = STAGES.iter().filter(|stage| !stage.long.is_empty());
        left_out.for_each(|stage| println!("  {}: {}", stage.name, stage.long));
    }
    reported
}

/// Prints what a stage does.
fn list(stage: &Stage) {
    if !stage.about.is_empty() {
        println!("{:8} {}", stage.name, stage.about);
    }
    if !stage.long.is_empty() {
        println!("{:8} --long: {}", stage.name, stage.long);
    }
}

fn timed(run: fn(Form) -> Result<Done>, form: Form) -> (Duration, Result<Done>) {
    let started = Instant::now();
    let done = run(form);
    (started.elapsed(), done)
}

/// Waits for a stage that runs beside the others.
fn joined((stage, thread): (&Stage, Running)) -> Row {
    let panicked =
        |_| (Duration::ZERO, Err(Error::Unexpected { what: "the stage", text: "it panicked".into() }));
    let (took, done) = thread.join().unwrap_or_else(panicked);
    (stage.name, took, judged(stage.name, done))
}

fn judged(name: &str, done: Result<Done>) -> Verdict {
    let verdict = match done {
        Ok(done) if host::strict() && !done.skipped.is_empty() => {
            Verdict::Failed(Error::Skipped { what: done.skipped.join("; ") })
        }
        Ok(done) => Verdict::Passed(done),
        Err(error) => Verdict::Failed(error),
    };
    if let Verdict::Failed(error) = &verdict {
        println!("{name}: {error}");
    }
    verdict
}

fn report(rows: &[Row], all: Duration) -> Result<()> {
    println!("\n{:8} {:>8}  {:6}", "stage", "seconds", "");
    for (name, took, verdict) in rows {
        let (state, note) = match verdict {
            Verdict::Passed(done) => ("ok", done.note.as_str()),
            Verdict::Failed(_) => ("FAILED", ""),
        };
        println!("{name:8} {:8.1}  {state:6}  {note}", took.as_secs_f64());
    }
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
const TOOLS: [(&str, &str, &str); 11] = [
    ("python3", "python3", "the independent decoder of golden frames"),
    ("systemd-analyze", "systemd", "verifying the units"),
    ("kill", "procps", "verifying the units, which call it"),
    ("strip", "binutils", "the size of the client"),
    ("g++", "g++", "libFuzzer"),
    ("openssl", "openssl", "certificates that clients must refuse"),
    ("groff", "groff-base", "rendering the manual pages"),
    ("xz", "xz-utils", "the tar archive of a release"),
    ("rpmbuild", "rpm", "the RPM package of a release"),
    ("git", "git", "changes of a release by version"),
    ("haproxy", "haproxy", "gateways behind a router"),
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

/// Makes the root before it is needed: that takes a minute, mostly of waiting.
fn boot_root() -> Result<Done> {
    or_skipped(boot::prepare())
}

fn under_systemd(form: Form) -> Result<Done> {
    let programs = if form == Form::Long { Programs::Release } else { Programs::Tested };
    or_skipped(boot::run_with(&boot::Args::default(), programs))
}

fn or_skipped(result: Result<()>) -> Result<Done> {
    match result {
        Ok(()) => Ok(Done::default()),
        Err(error @ (Error::Root { .. } | Error::ToolMissing { .. })) => Ok(Done::skipped(error.to_string())),
        Err(error) => Err(error),
    }
}

/// Runs a part of the check that needs the library.
fn stage(part: &str, form: Form) -> Result<Done> {
    let dir = tempfile::tempdir().map_err(Error::io("temporary directory"))?;
    let path = dir.path().join("result");
    let mut words = vec!["stage".as_ref(), part.as_ref(), "--result".as_ref(), path.as_os_str()];
    if form == Form::Long {
        words.push("--long".as_ref());
    }
    lab::run(words)?;
    let text = std::fs::read(&path).map_err(Error::at(&path))?;
    serde_json::from_slice(&text)
        .map_err(|error| Error::Unexpected { what: "the lab's result", text: error.to_string() })
}

fn every_order() -> Result<Done> {
    interleavings::run(&interleavings::Args::default()).map(Done::note)
}

fn fmt() -> Result<Done> {
    host::run(host::cargo().args(["fmt", "--all", "--check"]))?;
    Ok(Done::default())
}

fn tidy() -> Result<Done> {
    host::run(host::cargo().args(["tidy"]))?;
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

fn compile() -> Result<Done> {
    tests::build()?;
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
