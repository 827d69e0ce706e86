//! `cargo xtask mutants`: changes the parser of model files line by line until a test fails. A change that none notices is a check
//! that nothing holds.
//!
//! cargo-mutants makes and runs the changes, in a package of its own below the target directory: the parser, the mapping under
//! it and their tests, which build in seconds where the daemon takes a minute.

use std::fs;
use std::path::Path;

use crate::error::{Error, Result};
use crate::host;

/// The version that the command was written against.
const TOOL: &str = "cargo-mutants@27.1.0";

#[derive(clap::Args)]
pub struct Args {
    /// Only changes of files whose path matches this
    #[arg(long, value_name = "GLOB", default_value = "src/model/gguf/*.rs")]
    file: String,
    /// Changes tried at once
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Name the changes and try none
    #[arg(long)]
    list: bool,
}

/// What is copied, from the project to the package.
const COPIES: [&str; 8] = [
    "src/model/gguf",
    "src/tensor",
    "tests/adversarial/allocations.rs",
    "tests/adversarial/child.rs",
    "tests/adversarial/gguf.rs",
    "tests/adversarial/gguf_fields.rs",
    "tests/common",
    "tests/models",
];

/// Files of the package alone. Versions of crates are those of the workspace: its lock file comes along.
const WRITTEN: [(&str, &str); 4] = [
    (
        "Cargo.toml",
        r#"[workspace]
[package]
name = "rocmforge"
version = "0.1.0"
edition = "2024"
[dependencies]
libc = "0.2"
memmap2 = "0.9.12"
rustix = { version = "1.1.6", features = ["event", "fs", "mm", "net", "param", "pipe", "process"] }
thiserror = "2.0.21"
[dev-dependencies]
serde_json = { version = "1.0.154", features = ["preserve_order"] }
tempfile = "3.27.0"
[profile.dev]
opt-level = 0
debug = false
"#,
    ),
    ("src/lib.rs", "//! The parser of model files.\npub mod model;\npub mod tensor;\n"),
    ("src/model/mod.rs", "//! Model files.\npub mod gguf;\n"),
    (
        "tests/adversarial/main.rs",
        r#"#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]
mod allocations;
mod child;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/forge/mod.rs"]
mod forge;
mod gguf;
mod gguf_fields;
"#,
    ),
];

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    if !host::works(host::cargo().args(["mutants", "--version"])) {
        host::run(host::cargo().args(["install", "--locked", "--quiet", TOOL]))?;
    }
    let package = host::target_dir().join("mutants");
    write_package(&package)?;
    let mut command = host::cargo();
    command.current_dir(&package).args([
        "mutants",
        "--no-shuffle",
        "--colors",
        "never",
        "--file",
        &args.file,
    ]);
    if args.list {
        return host::run(command.arg("--list"));
    }
    // What loops for ever is noticed too: twenty times as long as the tests take, at least 20 s.
    command.args(["--minimum-test-timeout", "20", "--jobs", &args.jobs.to_string()]);
    host::run(&mut command)
}

fn write_package(package: &Path) -> Result<()> {
    for folder in ["src", "tests"] {
        let old = package.join(folder);
        if old.exists() {
            fs::remove_dir_all(&old).map_err(Error::at(&old))?;
        }
    }
    for path in COPIES {
        copy(&host::root().join(path), &package.join(path))?;
    }
    copy(&host::root().join("Cargo.lock"), &package.join("Cargo.lock"))?;
    for (path, text) in WRITTEN {
        let to = package.join(path);
        fs::write(&to, text).map_err(Error::at(&to))?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if from.is_dir() {
        for entry in fs::read_dir(from).map_err(Error::at(from))? {
            let entry = entry.map_err(Error::at(from))?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).map_err(Error::at(folder))?;
    }
    fs::copy(from, to).map_err(Error::at(from))?;
    Ok(())
}
