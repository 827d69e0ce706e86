//! Checks dependencies against deny.toml. The advisory database is on the internet: if it cannot be reached, the
//! result says so.

use std::process::{Output, Stdio};

use super::Done;
use crate::error::{Error, Result};
use crate::host;

/// The version that the check was written for; output and configuration change between versions.
const VERSION: &str = "0.20.2";

pub fn run() -> Result<Done> {
    if !host::works(host::cargo().args(["deny", "--version"]))
        && let Err(error) = host::install_crate(&format!("cargo-deny@{VERSION}"))
    {
        host::check_interrupted()?;
        return Ok(Done::skipped(format!("cargo deny: {error}")));
    }
    // Duplicates are warnings, which only `cargo deny check bans` shows.
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
        println!("advisories: NOT CHECKED, the advisory database cannot be reached");
        return Ok(Done::note("advisories not checked: database cannot be reached"));
    }
    eprint!("{said}");
    Err(Error::Command { command: shown, status })
}
