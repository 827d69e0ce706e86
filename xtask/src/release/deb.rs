//! The Debian package, by cargo-deb. `cargo xtask boot` tests it.

use std::path::Path;
use std::process::Command;

use super::history::Commit;
use crate::error::Result;
use crate::host::{self, Programs};

/// The version of cargo-deb that the package is made for.
const CARGO_DEB: &str = "3.8.0";

/// Writes the package of these programs, which are built, as are the pages beside them. Its files have the time of the
/// commit, if one is given.
///
/// # Errors
/// [`crate::error::Error::Command`] of cargo-deb, or of its installation.
pub fn write(to: &Path, programs: Programs, commit: Option<&Commit>) -> Result<()> {
    if !host::works(host::cargo().args(["deb", "--version"])) {
        host::install_crate(&format!("cargo-deb@{CARGO_DEB}"))?;
    }
    let mut command = host::cargo();
    command.args(["deb", "--quiet", "--no-build", "--strip", "--package", "rocmforge", "--output"]).arg(to);
    command.stdout(std::io::stderr());
    if let Some(commit) = commit {
        command.env("SOURCE_DATE_EPOCH", commit.time.to_string());
    }
    if programs == Programs::Tested {
        // cargo-deb then takes the files of target/debug for those of target/release.
        command.args(["--profile", "dev"]);
    }
    host::run(&mut command)
}

/// Debian's name of this machine's architecture.
pub(super) fn architecture() -> Result<String> {
    let mut command = Command::new("dpkg");
    host::read(command.arg("--print-architecture")).map(|text| text.trim_end().to_owned())
}
