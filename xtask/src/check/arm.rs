//! Runs the tests of the CPU backend as a 64-bit ARM program, under an emulator. Its vector code is compiled nowhere else
//! where the machine is an x86-64 one.

use std::path::Path;
use std::process::Command;

use super::{Done, tests};
use crate::error::{Error, Result};
use crate::host;

const TARGET: &str = "aarch64-unknown-linux-gnu";

/// The cross compiler, which also links.
const COMPILER: &str = "aarch64-linux-gnu-gcc";

const EMULATOR: &str = "qemu-aarch64-static";

/// Where Debian's packages keep ARM's C library.
const LIBRARY: &str = "/usr/aarch64-linux-gnu";

pub fn run() -> Result<Done> {
    if cfg!(target_arch = "aarch64") {
        return Ok(Done::note("the tests stage ran them without an emulator"));
    }
    match prepare() {
        Ok(()) => {}
        Err(error @ Error::ToolMissing { .. }) => return Ok(Done::skipped(format!("ARM: {error}"))),
        Err(error) => return Err(error),
    }
    let mut command = host::cargo();
    command
        .args(["test", "--target", TARGET, "--package", "rocmforge", "--lib", "backend::cpu"])
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", COMPILER)
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", format!("{EMULATOR} -L {LIBRARY}"));
    tests::finish(command)
}

/// Makes sure that the cross compiler, ARM's C library, the emulator and Rust's own library for the target are there.
fn prepare() -> Result<()> {
    host::ensure(COMPILER, "gcc-aarch64-linux-gnu")?;
    if !Path::new(LIBRARY).join("lib/crt1.o").exists() {
        host::install("libc6-dev-arm64-cross")?;
    }
    host::ensure(EMULATOR, "qemu-user-static")?;
    let libraries = host::read(Command::new("rustc").args(["--print", "target-libdir", "--target", TARGET]))?;
    if Path::new(libraries.trim()).exists() {
        return Ok(());
    }
    if !host::have("rustup") {
        return Err(Error::ToolMissing { program: TARGET.into(), package: "libstd-rust-dev:arm64" });
    }
    host::run(Command::new("rustup").args(["target", "add", TARGET]))
}
