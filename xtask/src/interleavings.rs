//! `cargo xtask interleavings`: tests in every order of their threads, by a model checker.
//!
//! The library is built with the checker's locks and atomics (`src/lock/bare.rs`), and the tests in files and modules called
//! `interleavings` are run: the poison flag, uploads, the engine against its clients.

use std::process::Stdio;

use crate::error::{Error, Result};
use crate::host;

#[derive(clap::Args, Default)]
pub struct Args {
    /// Threads stopped where they could go on, in one order at most; each test has its own number, of some seconds. One more
    /// takes about twenty times as long
    #[arg(long, value_name = "N")]
    switches: Option<u32>,
    /// Just tests whose name begins so
    #[arg(default_value = "")]
    name: String,
}

/// Runs the command; returns what the tests printed.
///
/// # Errors
/// [`Error::Command`] when an order fails: the test's output says which assertion, or which threads wait for ever.
pub fn run(args: &Args) -> Result<String> {
    let mut command = host::cargo();
    command.args(["test", "--quiet", "--workspace", "--lib", "--features", "loom"]);
    // Not optimised: the compiler would take longer than the tests.
    command.args(["--config", "profile.dev.package.rocmforge.opt-level=0", "--", "--nocapture"]);
    command.arg(format!("interleavings::{}", args.name)).stderr(Stdio::inherit());
    if let Some(switches) = args.switches {
        command.env("ROCMFORGE_LOOM_SWITCHES", switches.to_string());
    }
    let shown = host::shown(&command);
    let output = command.output().map_err(Error::io(shown.clone()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    print!("{text}");
    host::check_interrupted()?;
    match orders(&text) {
        _ if !output.status.success() => Err(Error::Command { command: shown, status: output.status }),
        0 => Err(Error::Unexpected { what: "the model checker", text: "no order was tried".to_owned() }),
        orders => Ok(format!("{orders} orders of threads")),
    }
}

/// Sum of what the tests say they tried.
fn orders(text: &str) -> u64 {
    let counts = text.lines().filter_map(|line| line.trim_start_matches('.').strip_suffix(" orders tried"));
    counts.filter_map(|count| count.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    #[test]
    fn orders_are_summed() {
        assert_eq!(super::orders("running 2 tests\n12 orders tried\n.30 orders tried\ntest result: ok."), 42);
    }
}
