//! The GPU that tests run on: through the runtime that `ROCMFORGE_HIP_LIB` names, else the look-alike that runs kernels on
//! the CPU. Never another than was asked for.

#![allow(dead_code)] // each test binary uses its own part

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use rocmforge::backend::hip::Runtime;

use crate::common::skip;

/// What the CPU look-alike says it is.
const LOOKALIKE: &str = "ROCmForge CPU look-alike";

/// What can compile it, as `cargo xtask kernels` looks for them.
const COMPILERS: [&str; 4] = ["clang++-22", "clang++-21", "clang++-20", "clang++-19"];

/// Why there is no runtime where [`library`] gives none.
pub fn why_not() -> String {
    format!(
        "no HIP runtime is named in ROCMFORGE_HIP_LIB, and for the look-alike one of {} is missing",
        COMPILERS.join(", ")
    )
}

/// The file of the runtime that tests run on: the one that was asked for, else the look-alike; `None` after [`skip`].
pub fn library() -> Option<PathBuf> {
    let found = named().or_else(|| lookalike().map(PathBuf::from));
    if found.is_none() {
        skip(&why_not());
    }
    found
}

/// Whether `runtime` is the CPU look-alike.
pub fn is_lookalike(runtime: &Runtime) -> bool {
    runtime.describe(0).is_ok_and(|description| description.name == LOOKALIKE)
}

/// The runtime to test on; `None` after [`skip`]. Where `ROCMFORGE_TEST_DEVICE` names a device, as `NAME at PLACE`, no other
/// answers.
pub fn runtime() -> Option<Runtime> {
    let path = library()?;
    let runtime = Runtime::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(named().is_some() || is_lookalike(&runtime), "the look-alike was built, something else answers");
    if let Some(wanted) = std::env::var_os("ROCMFORGE_TEST_DEVICE") {
        let device = runtime.describe(0).unwrap();
        let found = format!("{} at {}", device.name, device.pci);
        assert_eq!(
            Some(found.as_str()),
            wanted.to_str(),
            "another device answers than ROCMFORGE_TEST_DEVICE names"
        );
    }
    Some(runtime)
}

/// The runtime that was asked for: without it tests fail and do not fall back.
pub fn named() -> Option<PathBuf> {
    std::env::var_os("ROCMFORGE_HIP_LIB").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// The CPU look-alike, built where it is missing or old; `None` without a compiler for it. `ROCMFORGE_LOOKALIKE` names one
/// that is built already.
pub fn lookalike() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUILT
        .get_or_init(|| {
            if let Some(path) = std::env::var_os("ROCMFORGE_LOOKALIKE") {
                return Some(path.into());
            }
            COMPILERS.iter().find(|compiler| Command::new(compiler).arg("--version").output().is_ok())?;
            // Waves of 32 lanes, unless the environment names another of its variants.
            let variant = std::env::var("ROCMFORGE_LOOKALIKE_VARIANT").unwrap_or_else(|_| "wave32".into());
            let output = Command::new(env!("CARGO"))
                .args(["run", "--quiet", "--package", "xtask", "--", "kernels", "--lookalike", &variant])
                .current_dir(env!("CARGO_MANIFEST_DIR"))
                .output()
                .expect("cargo can be run");
            let text = String::from_utf8_lossy(&output.stdout);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "the look-alike could not be built: {errors}");
            let path = text.lines().last().map(PathBuf::from).unwrap_or_default();
            assert!(
                path.is_file(),
                "cargo xtask kernels --lookalike ends with the library's path: {text}{errors}"
            );
            Some(path)
        })
        .as_deref()
}
