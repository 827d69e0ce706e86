//! Runs the program of the kernel tests until the first test fails.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use xtask::error::{Error, Result};
use xtask::host;

/// How often a wait checks whether the user asked to stop.
const TICK: Duration = Duration::from_millis(100);

/// Result of a run of tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    Passed,
    /// The first failed test, or the program's exit status.
    Failed(String),
    /// No test ended within the time limit, so a loop is probably endless.
    Stalled,
}

/// The tests to run, as the test program selects them.
#[derive(Clone, Copy, Debug)]
pub enum Select<'a> {
    Only(&'a [&'a str]),
    AllBut(&'a [&'a str]),
}

/// The program of `tests/kernels`.
pub struct Suite {
    program: PathBuf,
}

impl Suite {
    /// Builds the program and keeps a copy at `to`, so that another build meanwhile does not change it.
    ///
    /// # Errors
    /// Errors of cargo and of copying.
    pub fn build(to: &Path) -> Result<Self> {
        let mut command = host::cargo();
        command.args(["test", "--quiet", "--workspace", "--test", "kernels", "--no-run"]);
        let said = host::read(command.arg("--message-format=json-render-diagnostics"))?;
        let program = said.lines().filter_map(program).next_back();
        let program = program.ok_or(Error::Unexpected { what: "cargo", text: "no test program".into() })?;
        fs::copy(&program, to).map_err(Error::at(&program))?;
        Ok(Self { program: to.into() })
    }

    /// Runs tests on `library`, with `preload` loaded first if given, until one fails or none ended for `patience`.
    /// Returns the result and the longest time between the ends of two tests.
    ///
    /// # Errors
    /// [`Error::Interrupted`], errors of starting the program.
    pub fn run(
        &self,
        library: &Path,
        preload: Option<&Path>,
        select: Select<'_>,
        patience: Duration,
    ) -> Result<(Ended, Duration)> {
        let mut command = Command::new(&self.program);
        match select {
            Select::Only(tests) => command.args(tests),
            Select::AllBut(tests) => command.args(tests.iter().flat_map(|name| ["--skip", name])),
        };
        if let Some(runtime) = preload {
            // Rust's runtime keeps some memory until the end, which is not a leak of ours.
            command.env("LD_PRELOAD", runtime).env("ASAN_OPTIONS", "detect_leaks=0");
        }
        command
            .current_dir(host::root())
            .env("ROCMFORGE_HIP_LIB", library)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // Its own process group, so that its children can be killed too.
            .process_group(0);
        let mut child = command.spawn().map_err(Error::io("the kernel tests"))?;
        let (sender, lines) = channel();
        let output = child.stdout.take();
        // The thread ends with the pipe.
        std::thread::spawn(move || {
            let lines = output.into_iter().flat_map(|pipe| BufReader::new(pipe).lines());
            lines.map_while(std::result::Result::ok).all(|line| sender.send(line).is_ok())
        });
        let watched = watch(&lines, patience);
        if !matches!(watched, Ok((None, _))) {
            end(&child);
        }
        let status = child.wait().map_err(Error::io("the kernel tests"))?;
        let (ended, longest) = watched?;
        let whole = if status.success() { Ended::Passed } else { Ended::Failed(status.to_string()) };
        Ok((ended.unwrap_or(whole), longest))
    }
}

/// Reads up to the first failure; `None` at the end of the output.
fn watch(lines: &Receiver<String>, patience: Duration) -> Result<(Option<Ended>, Duration)> {
    let (mut last, mut longest) = (Instant::now(), Duration::ZERO);
    loop {
        let line = lines.recv_timeout(TICK);
        host::check_interrupted()?;
        longest = longest.max(last.elapsed());
        match line {
            Ok(line) => {
                last = Instant::now();
                if let Some(test) = failed(&line) {
                    return Ok((Some(Ended::Failed(test.into())), longest));
                }
            }
            Err(RecvTimeoutError::Disconnected) => return Ok((None, longest)),
            Err(RecvTimeoutError::Timeout) if last.elapsed() > patience => {
                return Ok((Some(Ended::Stalled), longest));
            }
            Err(RecvTimeoutError::Timeout) => (),
        }
    }
}

fn end(child: &Child) {
    if let Some(group) = Pid::from_raw(child.id().cast_signed()) {
        // The process may have ended already; the wait sees that.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// The test that this line reports as failed.
fn failed(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.strip_suffix(" ... FAILED")
}

/// The test program that a line of cargo's output reports as built.
fn program(line: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(line).ok()?;
    let is_one = message["reason"] == "compiler-artifact" && message["target"]["kind"][0] == "test";
    message["executable"].as_str().filter(|_| is_one).map(PathBuf::from)
}

#[cfg(test)]
mod unit {
    #![allow(clippy::expect_used)] // tests fail by panicking

    use rocmforge_test_support::script;

    use super::*;

    #[test]
    fn a_run_ends_with_the_first_failure_or_when_nothing_ends_any_more() {
        let dir = tempfile::tempdir().expect("a folder");
        let run = |lines: &str| {
            let program = dir.path().join("tests");
            script::write(&program, lines);
            let suite = Suite { program };
            let patience = Duration::from_millis(500);
            suite.run(Path::new("lib"), None, Select::Only(&["a"]), patience).expect("it runs").0
        };
        assert_eq!(run("[ $1 = a ] && [ $ROCMFORGE_HIP_LIB = lib ]"), Ended::Passed);
        assert_eq!(run("echo 'test a::b ... FAILED'; sleep 1000"), Ended::Failed("a::b".into()));
        assert_eq!(run("echo 'test a::b ... ok'; exit 3"), Ended::Failed("exit status: 3".into()));
        assert_eq!(run("sleep 1000"), Ended::Stalled);
    }

    #[test]
    fn built_test_programs_are_taken() {
        let line = |kind: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","target":{{"kind":["{kind}"]}},"executable":"/t/kernels-1"}}"#
            )
        };
        assert_eq!(program(&line("test")), Some("/t/kernels-1".into()));
        assert_eq!(program(&line("lib")), None);
    }
}
