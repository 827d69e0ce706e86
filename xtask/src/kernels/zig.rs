//! The one compiler of code objects: clang and lld as the Python package `ziglang` carries them, the same build on every
//! system.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use crate::error::{Error, Result};
use crate::host;
use crate::models::{self, PipArchive};

/// Clang 22.1.8. Another version makes other bytes: change it together with the archive.
const VERSION: &str = "0.17.0";
const FILE: &str =
    "ziglang-0.17.0-py3-none-manylinux_2_12_x86_64.manylinux2010_x86_64.musllinux_1_1_x86_64.whl";
const SHA256: &str = "97079827064a7492cce5541ceb438ae8003ce1e54e399676da2d62fb7a5dc08b";
const BYTES: u64 = 101_011_302;

/// The program, fetched when it is missing.
#[derive(Clone, Debug)]
pub struct Zig {
    program: PathBuf,
}

impl Zig {
    /// # Errors
    /// Those of fetching.
    pub fn find() -> Result<Self> {
        let dir = host::tools_dir().join(format!("ziglang-{VERSION}"));
        let program = dir.join("ziglang/zig");
        if !program.is_file() {
            fetch(&dir)?;
        }
        Ok(Self { program })
    }

    /// What its outputs depend on beside its arguments.
    pub fn salt() -> String {
        SHA256.into()
    }

    pub fn clang(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("clang");
        command
    }

    pub fn lld(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("ld.lld");
        command
    }
}

fn fetch(dir: &PathBuf) -> Result<()> {
    let parent = host::tools_dir();
    fs::create_dir_all(&parent).map_err(Error::at(&parent))?;
    let working = tempfile::tempdir_in(&parent).map_err(Error::at(&parent))?;
    let archive = PipArchive {
        package: "ziglang".into(),
        version: VERSION,
        file: FILE.into(),
        bytes: BYTES,
        sha256: SHA256,
    };
    let wheel = models::pip_download(&archive, working.path())?;
    let unpacked = working.path().join("unpacked");
    host::run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&unpacked))?;
    let program = unpacked.join("ziglang/zig");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).map_err(Error::at(&program))?;
    match fs::rename(&unpacked, dir) {
        // Somebody else fetched it meanwhile.
        Err(_) if dir.join("ziglang/zig").is_file() => Ok(()),
        done => done.map_err(Error::at(dir)),
    }
}
