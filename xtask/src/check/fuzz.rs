//! A short fuzz of what outsiders send: frames, messages, connections, model files, templates, configurations. Each target also has a
//! planted fault that must be found.

use std::process::Command;

use super::Done;
use crate::error::Result;
use crate::host;

/// Seconds each target is fuzzed, as many at once as there are processors; building them comes before.
const SECONDS: &str = "8";

/// The targets whose planted fault is found in seconds; `fuzz/run.sh` has the others too.
const TARGETS: [&str; 4] = ["gguf_parse", "frame_header", "gguf_semantic", "session"];

pub fn run() -> Result<Done> {
    if !host::have("c++") {
        return Ok(Done::skipped("fuzzing: no C++ compiler for libFuzzer; install g++ (Debian package g++)"));
    }
    host::run(Command::new("sh").arg(host::root().join("fuzz/run.sh")).arg(SECONDS).args(TARGETS))?;
    Ok(Done::note(format!("{SECONDS} s each, planted faults found")))
}
