//! Client processes: this test binary again, as a client with one task.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

const SOCKET: &str = "ROCMFORGE_SCENARIO_SOCKET";
const ARGUMENT: &str = "ROCMFORGE_SCENARIO_ARGUMENT";

/// A client process that waits for a line on standard input before it starts, and prints lines.
pub struct Process {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Process {
    /// Starts `test` (its full path in this binary) as a client of `socket`.
    pub fn start(test: &str, socket: &Path, argument: &str) -> Self {
        Self::start_as(test, socket, argument, |_| ())
    }

    /// Like [`Process::start`]; `change` may alter the command.
    pub fn start_as(test: &str, socket: &Path, argument: &str, change: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(SOCKET, socket)
            .env(ARGUMENT, argument)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    pub fn go(&mut self) {
        self.child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    }

    /// The rest of the next line that starts with `key`.
    pub fn line(&mut self, key: &str) -> String {
        let mut line = String::new();
        while self.lines.read_line(&mut line).unwrap() > 0 {
            if let Some((_, rest)) = line.split_once(key) {
                return rest.trim().to_owned();
            }
            line.clear();
        }
        panic!("the client ended without a line {key:?}");
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The client process gets its socket and argument, after the parent releases it. `None` where the test runs as a test.
pub fn inside() -> Option<(std::path::PathBuf, String)> {
    let socket = std::env::var_os(SOCKET)?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    Some((socket.into(), std::env::var(ARGUMENT).unwrap()))
}

/// Token ids in the form that a client process prints.
pub fn ids_text(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}
