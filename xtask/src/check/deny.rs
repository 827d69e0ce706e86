//! Dependencies against deny.toml. The advisory database lives on the internet: where it cannot be reached, that is said.

use std::process::{Output, Stdio};

use super::Done;
use crate::error::{Error, Result};
use crate::host;

/// The version the check was written against; its output and configuration change between versions.
const VERSION: &str = "0.20.2";

pub fn run() -> Result<Done> {
    if !host::works(host::cargo().args(["deny", "--version"]))
        && let Err(error) = host::install_crate(&format!("cargo-deny@{VERSION}"))
    {
        host::check_interrupted()?;
        return Ok(Done::skipped(format!("cargo deny: {error}")));
    }
    // Duplicates are warnings: shown by `cargo deny check bans`, not in every run.
    host::run(host::cargo().args([
        "deny",
        "--workspace",
        "--log-level",
        "error",
        "check",
        "bans",
        "licenses",
        "sources",
    ]))?;
    let mut command = host::cargo();
    command.args(["deny", "--workspace", "--log-level", "error", "check", "advisories"]).stdin(Stdio::null());
    let shown = host::shown(&command);
    let Output { status, stderr, .. } = command.output().map_err(Error::io(shown.clone()))?;
    host::check_interrupted()?;
    let said = String::from_utf8_lossy(&stderr);
    if status.success() {
        return Ok(Done::note("advisories checked"));
    }
    if said.contains("failed to fetch advisory database") {
        println!("advisories: NOT CHECKED, the advisory database cannot be reached from here");
        return Ok(Done::note("advisories not checked: database out of reach"));
    }
    eprint!("{said}");
    Err(Error::Command { command: shown, status })
}
