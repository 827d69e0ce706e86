//! `cargo xtask docs`: manual pages and shell completions, made from the programs and documents.
//!
//! Pages of programs come from their command lines, the page of the configuration from `systemd/config.toml`, the
//! page of the protocol from `PROTOCOL.md`. The changelog comes from the history, licences from the crates. They are written beside the release binaries, where the package takes
//! them from.

mod config;
mod programs;
mod protocol;
mod roff;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};

use xtask::error::{Error, Result};
use xtask::host;
use xtask::release::documents;

#[derive(clap::Args)]
pub struct Args {
    /// Write into this folder [default: docs beside the release binaries, in target/release]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// A documentation file.
pub struct File {
    /// Path below the folder: `man/NAME.SECTION`, which the command then compresses, or `completions/SHELL/NAME`.
    pub path: String,
    pub text: Vec<u8>,
}

/// Writes all files.
///
/// # Errors
/// Errors of reading or writing.
pub fn run(args: &Args) -> Result<()> {
    let dir = args.out.clone().unwrap_or_else(default_dir);
    let count = write(&dir)?;
    documents::compress(&dir.join("man"))?;
    documents::write(&dir.join("doc"))?;
    println!("{count} files in {}", dir.display());
    Ok(())
}

/// The folder from which the package takes the files.
pub fn default_dir() -> PathBuf {
    host::target_dir().join("release/docs")
}

/// Writes all files into folders of their own, from which it removes other files. Returns the number of files.
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

/// Makes all files.
///
/// # Errors
/// A document cannot be read.
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
