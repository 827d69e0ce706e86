//! Checks that weights stay while no client is connected: one client process asks, no client is connected for a
//! while, another process asks.

use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use xtask::daemon::Daemon;
use xtask::error::{Error, Result};
use xtask::{host, lookalike};

const MODEL: &str = "tiny";

/// Starts a daemon on the CPU look-alike of a GPU. One process asks before the pause and another after it; in between
/// no client is connected. Returns a summary in words.
///
/// # Errors
/// [`Error::Unexpected`] if the second answer loaded weights again or differs.
pub fn across_sessions(binaries: &Path, pause: Duration) -> Result<String> {
    let library = lookalike::build(lookalike::Variant::Wave32)?;
    let models = tempfile::tempdir().map_err(Error::io("temporary directory"))?;
    let model = host::root().join("tests/models/tinystories-260k-f32.gguf");
    std::fs::copy(&model, models.path().join(format!("{MODEL}.gguf"))).map_err(Error::at(&model))?;
    let config = "[device]\nbackend = 'hip'\nupload_threads = 1\n[limits]\nstep_rows = 32\n";
    // Memory pressure of this machine, from whatever else runs there, would take weights of idle models.
    let environment =
        [("ROCMFORGE_HIP_LIB", library.as_os_str()), ("MEMORY_PRESSURE_WATCH", "/dev/null".as_ref())];
    let daemon = Daemon::start_with(binaries, &[models.path()], config, &environment)?;
    let first = answer(&daemon)?;
    let before = brought(&daemon)?;
    if before == 0 {
        return Err(Error::Unexpected {
            what: "the daemon",
            text: "the first answer loaded no weights".into(),
        });
    }
    let begun = Instant::now();
    while begun.elapsed() < pause {
        host::check_interrupted()?;
        thread::sleep(Duration::from_millis(100).min(pause.saturating_sub(begun.elapsed())));
    }
    let second = answer(&daemon)?;
    let after = brought(&daemon)?;
    daemon.stop()?;
    if first != second {
        return Err(Error::Unexpected { what: "the daemon", text: format!("{first:?}, then {second:?}") });
    }
    match after - before {
        0 => Ok(format!("{} s without a client, then 0 of {before} bytes loaded again", pause.as_secs())),
        bytes => Err(Error::Unexpected {
            what: "the daemon",
            text: format!("{bytes} bytes were loaded again after {} s without a client", pause.as_secs()),
        }),
    }
}

/// An answer to a separate client process.
fn answer(daemon: &Daemon) -> Result<String> {
    let mut command = daemon.client();
    command.args(["run", MODEL, "Once upon a time", "--max-tokens", "12", "--temperature", "0"]);
    host::read(command.stdin(Stdio::null()))
}

/// Bytes loaded to the device so far.
fn brought(daemon: &Daemon) -> Result<u64> {
    let reply = daemon.ask(&["residency"])?;
    let bytes = reply.pointer("/devices/0/load_bytes").and_then(Value::as_u64);
    bytes.ok_or_else(|| Error::Unexpected { what: "the client", text: reply.to_string() })
}
