//! Programs of shell that tests write and run.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Writes a program of these lines of shell. Another process writes it: the kernel runs no file that is open for writing. A
/// process that another test starts in this moment has copies of all files that this one has open.
pub fn write(program: &Path, lines: &str) {
    let mut command = Command::new("install");
    command.args(["-m", "755", "/dev/stdin"]).arg(program).stdin(Stdio::piped());
    let mut child = command.spawn().expect("install starts");
    let mut input = child.stdin.take().expect("a pipe");
    input.write_all(format!("#!/bin/sh\n{lines}\n").as_bytes()).expect("install reads");
    drop(input);
    assert!(child.wait().expect("install ends").success(), "{} was not written", program.display());
}
