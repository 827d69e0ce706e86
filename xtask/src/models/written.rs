//! Writes good GGUF files for tests with an independent writer's package; they are not fetched.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::{host, python};

/// The scripts that describe and write the files. tests/common/good.rs derives the directory from the same two.
const SCRIPTS: [&[u8]; 2] = [
    include_bytes!("../../../tests/models/describe-gguf.py"),
    include_bytes!("../../../tests/models/write-gguf.py"),
];

/// Path of the files in the directory of test data.
pub fn path(dir: &Path) -> PathBuf {
    let hash = super::hex(&Sha256::digest(SCRIPTS.concat()));
    dir.join(format!("written-{}", &hash[..12]))
}

/// Writes the files into the directory of test data, which the caller has locked, if they are missing. Takes about 10 s,
/// and longer the first time for the packages.
///
/// # Errors
/// [`Error::ToolMissing`], [`Error::Command`], [`Error::Io`].
pub fn ensure(dir: &Path) -> Result<PathBuf> {
    let kept = path(dir);
    if kept.is_dir() {
        return Ok(kept);
    }
    eprintln!("writing good model files with the package gguf");
    let venv = host::target_dir().join("writer");
    let python = python::environment(&venv, &[python::GGUF, "numpy"])?;
    let made = tempfile::Builder::new().prefix(".new-").tempdir_in(dir).map_err(Error::at(dir))?;
    let script = host::root().join("tests/models/write-gguf.py");
    let all = made.path().join("all");
    host::run(Command::new(python).arg("-B").arg(script).arg(&all))?;
    fs::rename(&all, &kept).map_err(Error::at(&kept))?;
    Ok(kept)
}
