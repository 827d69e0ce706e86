//! Runs the examination in another process, and reports when that process dies or hangs.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Output};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{Check, Report, State, examine};
use crate::aside::processes;
use crate::lock::{Mutex, Rank};

/// First argument that makes the program examine the GPUs and exit.
pub const SUBCOMMAND: &str = "examine-gpus";

/// Starting a GPU's runtime takes 0.02 to 3 s.
const LIMIT: Duration = Duration::from_secs(30);

/// An answer is reused for this long, so that many callers do not start a process each.
const FRESH: Duration = Duration::from_secs(2);

/// Precedes the report on its own line, because a runtime may print lines as well.
const MARK: &str = "rocmforge-gpus ";

/// Examines the GPUs through another process.
#[derive(Debug)]
pub struct Doctor {
    program: PathBuf,
    /// Its first argument.
    argument: PathBuf,
    limit: Duration,
    last: Mutex<Option<(Instant, Report)>>,
}

impl Doctor {
    /// `program` is `rocmforged` itself.
    pub fn new(program: &Path) -> Self {
        let argument = SUBCOMMAND.into();
        Self { program: program.into(), argument, limit: LIMIT, last: Mutex::new(Rank::Doctor, None) }
    }

    /// Returns a new report, or the last one if it is younger than 2 s. Blocks for at most 30 s.
    pub fn report(&self) -> Report {
        let mut last = self.last.lock();
        if let Some((when, report)) = &*last
            && when.elapsed() < FRESH
        {
            return report.clone();
        }
        let report = self.look();
        *last = Some((Instant::now(), report.clone()));
        report
    }

    fn look(&self) -> Report {
        let mut command = Command::new(&self.program);
        command.arg(&self.argument).current_dir("/");
        let child = match processes::start(command) {
            Ok(child) => child,
            Err(error) => return failed(format!("{} cannot be started: {error}", self.program.display())),
        };
        match wait(child, self.limit) {
            Some(Ok(output)) => parse(&output),
            Some(Err(error)) => failed(format!("the process that examines the GPUs failed: {error}")),
            None => failed(format!(
                "the GPU's runtime did not answer within {} s; see the kernel's messages: dmesg | grep amdgpu",
                self.limit.as_secs()
            )),
        }
    }
}

/// The process's output and exit status. `None` after `limit`; the process is then killed.
fn wait(child: Child, limit: Duration) -> Option<std::io::Result<Output>> {
    let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
    let (sender, receiver) = mpsc::channel();
    // This thread waits for the process, even where a broken driver keeps it from ending.
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    let answer = receiver.recv_timeout(limit).ok();
    if let (None, Ok(process)) = (&answer, process) {
        let _ = pidfd_send_signal(process, Signal::KILL);
    }
    answer
}

fn parse(output: &Output) -> Report {
    let text = String::from_utf8_lossy(&output.stdout);
    let report = text.lines().rev().find_map(|line| serde_json::from_str(line.strip_prefix(MARK)?).ok());
    report.unwrap_or_else(|| {
        let errors = String::from_utf8_lossy(&output.stderr);
        let last = errors.lines().next_back().unwrap_or("it printed nothing").to_owned();
        failed(format!("the GPU's runtime ended the process that examines GPUs ({}): {last}", output.status))
    })
}

fn failed(found: String) -> Report {
    Report { checks: vec![Check::new("HIP runtime", State::Problem, found, "")], gpus: vec![] }
}

/// Main function of the examining process: prints the report.
pub fn child_main() -> ExitCode {
    let report = examine();
    let Ok(text) = serde_json::to_string(&report) else { return ExitCode::FAILURE };
    // The report starts a new line, after any unfinished line of a runtime.
    let line = format!("\n{MARK}{text}\n");
    match std::io::stdout().write_all(line.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A doctor that runs this script as its process. A shell reads it: the kernel runs no file that is open for writing. A
    /// process that another test starts in this moment has it open too.
    fn doctor(script: &str, limit: Duration) -> (tempfile::TempDir, Doctor) {
        let folder = tempfile::tempdir().expect("a folder");
        let argument = folder.path().join("script");
        std::fs::write(&argument, format!("{script}\n")).expect("written");
        (folder, Doctor { program: "/bin/sh".into(), argument, limit, last: Mutex::new(Rank::Doctor, None) })
    }

    #[test]
    fn the_report_is_found_among_other_lines() {
        let json = r#"{"checks":[{"name":"a","state":"Note","found":"b","advice":""}],"gpus":[]}"#;
        let (_folder, doctor) = doctor(&format!("echo noise; echo '{MARK}{json}'; echo more"), LIMIT);
        let report = doctor.report();
        assert_eq!(report.checks, [Check::new("a", State::Note, "b", "")]);
    }

    #[test]
    fn a_process_that_dies_or_hangs_is_a_finding() {
        // A shell takes no other signal: it is started with all of them blocked.
        let (_folder, dying) = doctor("echo 'HSA: no memory' >&2; kill -KILL $$", LIMIT);
        let found = dying.report().checks[0].found.clone();
        assert!(found.contains("HSA: no memory") && found.contains("signal: 9"), "{found}");
        let (_folder, hanging) = doctor("exec sleep 600", Duration::from_millis(50));
        let found = hanging.report().checks[0].found.clone();
        assert!(found.contains("did not answer"), "{found}");
        let missing = Doctor::new(Path::new("/nowhere/rocmforged"));
        assert!(missing.report().checks[0].found.contains("cannot be started"));
    }

    #[test]
    fn an_answer_is_given_again_for_a_moment() {
        let (folder, doctor) = doctor("echo x >> \"$(dirname \"$0\")/runs\"", LIMIT);
        let first = doctor.report();
        assert_eq!(doctor.report(), first);
        let runs = std::fs::read_to_string(folder.path().join("runs")).expect("it ran");
        // It ran twice only if the machine paused for longer than an answer is reused.
        assert!(runs.lines().count() < 3);
    }
}
