//! Python environments with packages at fixed versions, below the target directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};
use crate::host;

/// The independent writer and reader of GGUF files.
pub const GGUF: &str = "gguf==0.19.0";

/// llama.cpp, prebuilt as a Python module.
pub const LLAMA_CPP: &str = "xllamacpp==2026.10.11549";

/// Path of Python in the environment at `venv`, which is made if it is missing or holds other packages.
///
/// # Errors
/// [`Error::ToolMissing`], [`Error::Command`].
pub fn environment(venv: &Path, packages: &[&str]) -> Result<PathBuf> {
    let python = venv.join("bin/python");
    let holds = venv.join("holds.txt");
    let want = packages.join("\n");
    if fs::read_to_string(&holds).is_ok_and(|text| text == want) {
        return Ok(python);
    }
    host::ensure("python3", "python3")?;
    if !host::works(Command::new("python3").args(["-c", "import ensurepip, venv"])) {
        host::install("python3-venv")?;
    }
    host::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(venv))?;
    host::run(
        Command::new(&python)
            .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"])
            .args(packages),
    )?;
    fs::write(&holds, want).map_err(Error::at(&holds))?;
    Ok(python)
}
