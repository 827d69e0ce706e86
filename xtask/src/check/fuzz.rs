//! A short fuzz of untrusted input: frames, messages, connections, bodies of HTTP, model files, templates,
//! configurations. Each
//! target also has a planted fault that the fuzzer must find.

use std::process::Command;

use super::Done;
use crate::error::Result;
use crate::host;

/// Seconds of fuzzing per target, with one target per processor at a time; building takes extra time.
const SECONDS: &str = "8";

/// Targets whose planted fault is found within seconds; `fuzz/run.sh` also has the others.
const TARGETS: [&str; 4] = ["gguf_parse", "frame_header", "gguf_semantic", "session"];

pub fn run() -> Result<Done> {
    if !host::have("c++") {
        return Ok(Done::skipped(
            "fuzzing: there is no C++ compiler for libFuzzer; install g++ (Debian package g++)",
        ));
    }
    host::run(Command::new("sh").arg(host::root().join("fuzz/run.sh")).arg(SECONDS).args(TARGETS))?;
    Ok(Done::note(format!("{SECONDS} s each, all planted faults found")))
}
