//! Runs one part of the report: a program of ours with a time limit, and its result.

use std::fs::{self, File};
use std::io::{IsTerminal, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use xtask::error::{Error, Result};
use xtask::{check, host};

/// Prefix of the line that a skipped test prints; see tests/common/mod.rs.
const SKIPPED: &str = "rocmforge-test-skipped: ";

/// Prefix of a measurement's JSON line; see benches/.
const MEASURED: &str = "measured ";

/// How long to wait for the end of a killed process, which a broken driver may hold.
const END_MAX: Duration = Duration::from_secs(10);

/// The output that a program needs to pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Tests: at least one passes, none fails.
    Tests,
    /// Measurements: at least one, of the requested device.
    Measurements,
}

/// Result of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Passed,
    Failed,
    /// Not tried; `note` says why.
    Left,
}

/// Outcome of a part.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub name: String,
    pub state: State,
    pub seconds: f64,
    /// Note for the table: counts, or why the part failed.
    pub note: String,
    pub measured: Vec<Value>,
    /// Skipped tests, each with the reason.
    pub skipped: Vec<String>,
    /// The whole output.
    pub output: String,
}

impl Outcome {
    /// Outcome of a part that is not a program.
    pub fn of(name: &str, started: Instant, done: std::result::Result<String, String>) -> Self {
        let (state, note) = match done {
            Ok(note) => (State::Passed, note),
            Err(why) => (State::Failed, why),
        };
        let seconds = started.elapsed().as_secs_f64();
        Self { seconds, state, note, ..Self::left(name, "") }
    }

    /// Outcome of a part that was not tried.
    pub fn left(name: &str, why: &str) -> Self {
        Self {
            name: name.into(),
            state: State::Left,
            seconds: 0.0,
            note: why.into(),
            measured: vec![],
            skipped: vec![],
            output: String::new(),
        }
    }
}

/// A program's output and status.
#[derive(Debug)]
struct Ran {
    /// `None` if the time limit ended it.
    status: Option<ExitStatus>,
    seconds: f64,
    output: String,
}

/// Runs a program for at most `limit`, with its output in the file `log`. `device` is the device that measurements
/// must name.
///
/// # Errors
/// [`Error::Interrupted`], [`Error::Io`] for the log.
pub fn run(
    name: &str,
    kind: Kind,
    command: &mut Command,
    limit: Duration,
    log: &Path,
    device: &str,
) -> Result<Outcome> {
    let ran = run_limited(name, command, limit, log)?;
    Ok(judge(name, kind, ran, limit, device))
}

fn judge(name: &str, kind: Kind, ran: Ran, limit: Duration, device: &str) -> Outcome {
    let lines: Vec<String> = ran.output.lines().map(str::to_owned).collect();
    let skipped: Vec<String> =
        lines.iter().filter_map(|line| Some(line.split_once(SKIPPED)?.1.to_owned())).collect();
    let measured: Vec<Value> = lines
        .iter()
        .filter_map(|line| serde_json::from_str(line.trim_start().strip_prefix(MEASURED)?).ok())
        .collect();
    let (passed, failed) = check::count(&lines);
    let counts = format!("{passed} passed, {failed} failed, {} skipped", skipped.len());
    let done = match (ran.status, kind) {
        (None, _) => Err(format!("not done within {} s", limit.as_secs())),
        (Some(status), Kind::Tests) if !status.success() && failed > 0 => Err(counts),
        (Some(status), _) if !status.success() => Err(format!("{status}: {}", last_words(&lines))),
        (Some(_), Kind::Tests) if passed == 0 => Err("no test ran".into()),
        (Some(_), Kind::Tests) => Ok(counts),
        (Some(_), Kind::Measurements) => of_device(&measured, device),
    };
    let (state, note) = match done {
        Ok(note) => (State::Passed, note),
        Err(why) => (State::Failed, why),
    };
    let output = ran.output;
    Outcome { name: name.into(), state, seconds: ran.seconds, note, measured, skipped, output }
}

/// Rejects measurements of another device, and an empty list.
fn of_device(measured: &[Value], device: &str) -> std::result::Result<String, String> {
    let named = measured.iter().find(|one| one["what"] == "device").map(|one| one["device"].clone());
    match named {
        Some(Value::String(name)) if name == device && measured.len() > 1 => {
            Ok(format!("{} values", measured.len() - 1))
        }
        Some(Value::String(name)) if name == device => Err("it measured nothing".into()),
        Some(other) => Err(format!("it ran on {other}, not on {device}")),
        None => Err("it did not name its device".into()),
    }
}

/// The last non-empty line.
fn last_words(lines: &[String]) -> &str {
    lines.iter().rev().map(|line| line.trim()).find(|line| !line.is_empty()).unwrap_or("it printed nothing")
}

fn run_limited(name: &str, command: &mut Command, limit: Duration, log: &Path) -> Result<Ran> {
    let file = File::create(log).map_err(Error::at(log))?;
    let errors = file.try_clone().map_err(Error::at(log))?;
    // Its own process group, so that processes it starts end with it.
    command.process_group(0).stdin(Stdio::null()).stdout(file).stderr(errors);
    let started = Instant::now();
    let child = command.spawn().map_err(Error::io(host::shown(command)))?;
    let status = wait(name, child, started, limit)?;
    let bytes = fs::read(log).map_err(Error::at(log))?;
    let output = String::from_utf8_lossy(&bytes).into_owned();
    Ok(Ran { status, seconds: started.elapsed().as_secs_f64(), output })
}

/// `None` if the process reached the time limit and was killed.
fn wait(name: &str, mut child: Child, started: Instant, limit: Duration) -> Result<Option<ExitStatus>> {
    let shows = std::io::stderr().is_terminal();
    loop {
        if let Some(status) = child.try_wait().map_err(Error::io("wait"))? {
            return Ok(Some(status));
        }
        let interrupted = host::check_interrupted();
        if interrupted.is_err() || started.elapsed() > limit {
            end(&mut child);
            return interrupted.map(|()| None);
        }
        if shows {
            eprint!("\r{name:24} {:4} s of at most {} ", started.elapsed().as_secs(), limit.as_secs());
            // A terminal that accepts no more output is no reason to stop.
            let _ = std::io::stderr().flush();
        }
        thread::sleep(Duration::from_millis(if shows { 200 } else { 20 }));
    }
}

fn end(child: &mut Child) {
    if let Some(group) = Pid::from_raw(child.id().cast_signed()) {
        // The process may have ended already; the wait below sees that.
        let _ = kill_process_group(group, Signal::KILL);
    }
    let asked = Instant::now();
    while asked.elapsed() < END_MAX {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod unit {
    #![allow(clippy::expect_used)] // tests fail by panicking

    use super::*;

    const DEVICE: &str = "A card at 0000:03:00.0";

    fn shell(kind: Kind, script: &str, limit: Duration) -> Outcome {
        let dir = tempfile::tempdir().expect("a folder");
        let mut command = Command::new("sh");
        command.arg("-c").arg(script);
        run("a part", kind, &mut command, limit, &dir.path().join("log"), DEVICE).expect("it runs")
    }

    #[test]
    fn tests_pass_when_some_ran_and_none_failed() {
        let long = Duration::from_secs(60);
        let result =
            "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1s";
        let good = shell(
            Kind::Tests,
            &format!("echo '{result}'; echo 'rocmforge-test-skipped: t: no file' >&2"),
            long,
        );
        assert_eq!((good.state, good.note.as_str()), (State::Passed, "3 passed, 0 failed, 1 skipped"));
        assert_eq!(good.skipped, ["t: no file"]);
        let none = shell(Kind::Tests, "true", long);
        assert_eq!((none.state, none.note.as_str()), (State::Failed, "no test ran"));
        let died = shell(Kind::Tests, "echo HSA: memory fault; kill -ABRT $$", long);
        assert!(died.state == State::Failed && died.note.ends_with("HSA: memory fault"), "{}", died.note);
        let failed =
            shell(Kind::Tests, "echo 'test result: FAILED. 3 passed; 2 failed; 0 ignored'; exit 101", long);
        assert_eq!((failed.state, failed.note.as_str()), (State::Failed, "3 passed, 2 failed, 0 skipped"));
    }

    #[test]
    fn measurements_are_of_the_device_that_was_asked_for() {
        let long = Duration::from_secs(60);
        let on = |device: &str| format!("echo 'measured {{\"what\":\"device\",\"device\":\"{device}\"}}';");
        let value = "echo '  measured {\"what\":\"read\",\"gb_s\":1.5}'; echo 'measured nothing'";
        let good = shell(Kind::Measurements, &(on(DEVICE) + value), long);
        assert_eq!((good.state, good.note.as_str()), (State::Passed, "1 values"));
        assert_eq!(good.measured[1]["gb_s"], 1.5);
        for (script, why) in [
            (on("ROCmForge CPU look-alike at ") + value, "it ran on"),
            (on(DEVICE), "it measured nothing"),
            (value.into(), "it did not name its device"),
        ] {
            let bad = shell(Kind::Measurements, &script, long);
            assert!(bad.state == State::Failed && bad.note.starts_with(why), "{}", bad.note);
        }
    }

    #[test]
    fn a_part_that_takes_too_long_ends_with_all_that_it_started() {
        let started = Instant::now();
        let script = "sleep 600 & sleep 600";
        let hung = shell(Kind::Tests, script, Duration::from_millis(50));
        assert_eq!((hung.state, hung.note.as_str()), (State::Failed, "not done within 0 s"));
        assert!(started.elapsed() < Duration::from_secs(300));
    }
}
