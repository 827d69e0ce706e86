//! The only compiler of code objects: clang and lld from the Python package `ziglang`, the same build on every
//! system.

use std::path::PathBuf;
use std::process::Command;

use xtask::error::Result;

use super::wheels::{Wheel, unpacked};

/// Clang 22.1.8. Another version gives other bytes: change it together with the archive.
const WHEEL: Wheel = Wheel {
    package: "ziglang",
    version: "0.17.0",
    file: "ziglang-0.17.0-py3-none-manylinux_2_12_x86_64.manylinux2010_x86_64.musllinux_1_1_x86_64.whl",
    bytes: 101_011_302,
    sha256: "97079827064a7492cce5541ceb438ae8003ce1e54e399676da2d62fb7a5dc08b",
};

/// The program, fetched if it is missing.
#[derive(Clone, Debug)]
pub struct Zig {
    program: PathBuf,
}

impl Zig {
    /// # Errors
    /// Errors of fetching.
    pub fn find() -> Result<Self> {
        let dir = unpacked("ziglang-0.17.0", &[WHEEL], &["ziglang/zig"])?;
        Ok(Self { program: dir.join("ziglang/zig") })
    }

    /// Everything besides the arguments that affects its outputs.
    pub fn salt() -> String {
        WHEEL.sha256.into()
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
