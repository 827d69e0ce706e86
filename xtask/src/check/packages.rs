//! The packages of a release, read by the tools of those who install them.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::Done;
use crate::error::{Error, Result};
use crate::host::{self, Programs};
use crate::release;

/// Warnings of lintian that are right: the package is none of Debian's own, and the daemon starts the metrics unit.
const ALLOWED: &str = "initial-upload-closes-no-bugs,systemd-service-file-refers-to-unusual-wantedby-target";

/// Packages release programs, and checks the packages.
pub fn run() -> Result<Done> {
    host::ensure("lintian", "lintian")?;
    Programs::Release.build()?;
    let files = release::run_with(Programs::Release, host::target_dir().join("check-packages"))?;
    let of_kind = |end: &str| {
        let found = files.iter().find(|path| path.to_string_lossy().ends_with(end));
        found.ok_or_else(|| Error::Unexpected { what: "the packages", text: format!("there is no {end}") })
    };
    debian(of_kind(".deb")?)?;
    rpm(of_kind(".rpm")?)?;
    let versions = archive(of_kind(".tar.xz")?)?;
    let folder = of_kind("SHA256SUMS")?.parent().map_or_else(PathBuf::new, Path::to_owned);
    host::run(Command::new("sha256sum").current_dir(folder).args([
        "--check",
        "--strict",
        "--quiet",
        "SHA256SUMS",
    ]))?;
    Ok(Done::note(format!("{} files, {versions} programs ran from the archive", files.len())))
}

/// No error and no warning of lintian.
fn debian(path: &Path) -> Result<()> {
    let mut lintian = Command::new("lintian");
    lintian.args(["--fail-on", "error,warning", "--suppress-tags", ALLOWED]);
    if host::is_root() {
        lintian.arg("--allow-root");
    }
    host::run(lintian.arg(path))
}

/// Digests of the header and the payload, and scripts that a shell can read.
fn rpm(path: &Path) -> Result<()> {
    host::run(Command::new("rpm").args(["--checksig", "--nosignature"]).arg(path))?;
    for script in ["POSTIN", "PREUN", "POSTUN", "TRIGGERSCRIPTS"] {
        let text =
            host::read(Command::new("rpm").args(["-qp", "--qf", &format!("%{{{script}}}")]).arg(path))?;
        host::run(Command::new("sh").args(["-n", "-c", &text]))?;
    }
    Ok(())
}

/// Programs of the unpacked archive run, and tell the version of the project. Returns their number.
fn archive(path: &Path) -> Result<usize> {
    let folder = tempfile::tempdir().map_err(Error::io("temporary directory"))?;
    host::run(
        Command::new("tar").arg("-C").arg(folder.path()).args(["--strip-components=1", "-xf"]).arg(path),
    )?;
    let mut count = 0;
    for name in ["rocmforged", "rocmforge-client", "rocmforge-top", "rocmforge-gateway"] {
        let said = host::read(Command::new(folder.path().join("bin").join(name)).arg("--version"))?;
        if said.trim_end() != format!("{name} {}", env!("CARGO_PKG_VERSION")) {
            return Err(Error::Unexpected {
                what: "the version of a program",
                text: format!("{name}: {said}"),
            });
        }
        count += 1;
    }
    Ok(count)
}
