//! Runs all tests and passes on their output; counts skipped tests.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::thread;

use super::Done;
use crate::error::{Error, Result};
use crate::host;

/// Prefix of the line that a skipped test prints; see tests/common/mod.rs.
const SKIPPED: &str = "rocmforge-test-skipped: ";

/// Prefix of the line of a test that not every machine can run. A stage of such tests alone counts it as skipped.
const NOT_RUN: &str = "rocmforge-test-not-run: ";

/// Builds all programs and tests of the workspace.
///
/// # Errors
/// [`Error::Command`], [`Error::Interrupted`].
pub fn build() -> Result<()> {
    host::run(cargo_test().args(["--quiet", "--no-run"]))?;
    host::build_tested(&["--bins"])
}

/// Runs all tests.
pub fn run() -> Result<Done> {
    let mut command = cargo_test();
    command.arg("--no-fail-fast");
    finish(command)
}

fn cargo_test() -> Command {
    let mut command = host::cargo();
    // One more than processors, because many tests wait for a limit of time.
    let threads = thread::available_parallelism().map_or(2, usize::from) + 1;
    command.args(["test", "--workspace"]).env("RUST_TEST_THREADS", threads.to_string());
    command
}

/// Runs the tests of architectures on a GPU for all lengths.
pub fn lengths() -> Result<Done> {
    let mut command = cargo_test();
    command.args(["--test", "reference", "on_a_gpu_with"]).env("ROCMFORGE_LONG", "1");
    finish(command)
}

/// Runs the tests of clients that take minutes to install.
pub fn clients() -> Result<Done> {
    let mut command = host::cargo();
    command.args(["test", "--test", "gateway", "clients::"]).env("ROCMFORGE_LONG", "1");
    finish_all(command)
}

/// Asks a real model by all JSON schemas, published ones too, and has another implementation check the answers.
pub fn schemas() -> Result<Done> {
    let mut command = host::cargo();
    command.args(["test", "--test", "scenario", "--", "--nocapture", "published::", "schemas::"]);
    command.env("ROCMFORGE_LONG", "1");
    finish_all(command)
}

/// Runs tests and counts those that were skipped.
pub(super) fn finish(command: Command) -> Result<Done> {
    finished(command, &[SKIPPED])
}

/// As [`finish`], where each test is to run.
fn finish_all(command: Command) -> Result<Done> {
    finished(command, &[SKIPPED, NOT_RUN])
}

/// Runs tests. A line with one of these prefixes names a skipped one.
fn finished(mut command: Command, skips: &[&str]) -> Result<Done> {
    command.stdin(Stdio::null());
    let shown = host::shown(&command);
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(Error::io(shown.clone()))?;
    let stderr = child.stderr.take().map(|pipe| thread::spawn(move || pass_on(pipe, std::io::stderr())));
    let mut lines = child.stdout.take().map(|pipe| pass_on(pipe, std::io::stdout())).unwrap_or_default();
    // The thread ends with the pipe; if it panics, only lines that were already shown are lost.
    lines.extend(stderr.and_then(|thread| thread.join().ok()).unwrap_or_default());
    let status = child.wait().map_err(Error::io(shown.clone()))?;
    host::check_interrupted()?;
    let (passed, failed) = count(&lines);
    let skip = |line: &String| {
        skips.iter().find_map(|prefix| line.split_once(*prefix)).map(|(_, why)| why.to_owned())
    };
    let skipped: Vec<String> = lines.iter().filter_map(skip).collect();
    if !status.success() {
        for line in lines.iter().filter(|line| line.starts_with("test ") && line.ends_with("FAILED")) {
            println!("{line}");
        }
        return Err(Error::Command {
            command: format!("{shown} ({passed} passed, {failed} failed)"),
            status,
        });
    }
    Ok(Done { note: format!("{passed} passed, {} skipped", skipped.len()), skipped })
}

/// Copies lines as they arrive; returns the lines to remember.
fn pass_on(from: impl Read, mut to: impl Write) -> Vec<String> {
    let mut kept = Vec::new();
    let mut reader = BufReader::new(from);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
        // Tests must not stall if our own output fails.
        let _ = to.write_all(&line);
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        if text.starts_with("test ") || text.contains(SKIPPED) || text.contains(NOT_RUN) {
            kept.push(text.to_owned());
        }
        line.clear();
    }
    kept
}

/// Adds up the lines `test result: ok. 3 passed; 0 failed; ...`: passed and failed.
pub fn count(lines: &[String]) -> (u64, u64) {
    let number_before = |line: &str, word: &str| -> u64 {
        let before = line.split(word).next().unwrap_or_default();
        before.split_whitespace().last().and_then(|number| number.parse().ok()).unwrap_or(0)
    };
    let results = lines.iter().filter(|line| line.starts_with("test result: "));
    results.fold((0, 0), |(passed, failed), line| {
        (passed + number_before(line, " passed;"), failed + number_before(line, " failed;"))
    })
}

#[cfg(test)]
mod unit {
    #[test]
    fn results_are_summed() {
        let lines = [
            "test a ... ok",
            "test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.12s",
        ];
        assert_eq!(super::count(&lines.map(str::to_owned)), (15, 2));
    }
}
