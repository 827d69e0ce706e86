//! `cargo xtask interleavings`: runs tests in every order of their threads, with a model checker.
//!
//! Builds the library with the checker's locks and atomics (`src/lock/bare.rs`), and runs the tests in files and
//! modules called `interleavings`. These test the poison flag, uploads, the engine against its clients.

use std::process::Stdio;

use crate::error::{Error, Result};
use crate::host;

#[derive(clap::Args, Default)]
pub struct Args {
    /// Most preemptions per order: threads stopped where they could go on; by default each test has its own number,
    /// for some seconds. One more takes about twenty times as long
    #[arg(long, value_name = "N")]
    switches: Option<u32>,
    /// Only tests whose name begins with this
    #[arg(default_value = "")]
    name: String,
}

/// Runs the command; returns a summary of what the tests printed.
///
/// # Errors
/// [`Error::Command`] if an order fails: the tests' output has the failed assertion, or the deadlocked threads.
pub fn run(args: &Args) -> Result<String> {
    let mut command = host::cargo();
    command.args(["test", "--quiet", "--package", "rocmforge", "--lib", "--features", "loom"]);
    // Not optimised, because the compiler would take longer than the tests.
    command.args(["--config", "profile.dev.package.rocmforge.opt-level=0"]);
    // On all processors, because nothing else is compiled meanwhile.
    command.args(["--config", "profile.dev.package.rocmforge.codegen-units=16", "--", "--nocapture"]);
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

/// Adds up the orders that the tests report.
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
