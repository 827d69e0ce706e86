//! `cargo xtask docs`: manual pages and shell completions, from what the programs and documents say already.
//!
//! Pages of programs come out of their command lines, that of the configuration out of `systemd/config.toml`, that of the
//! protocol out of `PROTOCOL.md`. They lie beside the release binaries, where the package takes them from.

mod config;
mod programs;
mod protocol;
mod roff;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::host;

#[derive(clap::Args)]
pub struct Args {
    /// Write into this folder [default: docs beside the release binaries, in target/release]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// A file of documentation.
pub struct File {
    /// Below the folder: `man/NAME.SECTION`, or `completions/SHELL/NAME`.
    pub path: String,
    pub text: Vec<u8>,
}

/// Writes all files.
///
/// # Errors
/// What could not be read or written.
pub fn run(args: &Args) -> Result<()> {
    let dir = args.out.clone().unwrap_or_else(default_dir);
    let count = write(&dir)?;
    println!("{count} files in {}", dir.display());
    Ok(())
}

/// Where the package takes them from.
pub fn default_dir() -> PathBuf {
    host::target_dir().join("release/docs")
}

/// Writes all files into a folder of their own, in which others are removed; how many.
pub fn write(dir: &Path) -> Result<usize> {
    let files = files()?;
    for folder in ["man", "completions"] {
        match fs::remove_dir_all(dir.join(folder)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(Error::at(dir)(error)),
            _ => {}
        }
    }
    for file in &files {
        let path = dir.join(&file.path);
        let folder = path.parent().unwrap_or(dir);
        fs::create_dir_all(folder).map_err(Error::at(folder))?;
        fs::write(&path, &file.text).map_err(Error::at(&path))?;
    }
    Ok(files.len())
}

/// All files.
///
/// # Errors
/// A document that cannot be read.
pub fn files() -> Result<Vec<File>> {
    let document = |name: &str| {
        let path = host::root().join(name);
        fs::read_to_string(&path).map_err(Error::at(&path))
    };
    let mut files = programs::pages().map_err(Error::io("a page"))?;
    files.push(File {
        path: "man/rocmforge-config.5".into(),
        text: config::page(&config::entries(&document("systemd/config.toml")?)).into(),
    });
    files.push(File {
        path: "man/rocmforge-protocol.7".into(),
        text: protocol::page(&document("PROTOCOL.md")?).into(),
    });
    files.extend(programs::completions());
    Ok(files)
}
