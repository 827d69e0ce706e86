//! The GPU that tests run on: the runtime that `ROCMFORGE_HIP_LIB` names, else the look-alike that runs kernels on the
//! CPU. A requested runtime is never replaced by another.

#![allow(dead_code)] // each test binary uses a part

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use rocmforge::backend::hip::Runtime;

use crate::common::skip;

/// The device name that the CPU look-alike reports.
const LOOKALIKE: &str = "ROCmForge CPU look-alike";

/// Compilers for the look-alike, in the order in which `cargo xtask lookalike` looks for them.
const COMPILERS: [&str; 4] = ["clang++-22", "clang++-21", "clang++-20", "clang++-19"];

/// The reason when [`library`] finds no runtime.
pub fn why_not() -> String {
    format!(
        "ROCMFORGE_HIP_LIB names no HIP runtime, and for the look-alike none of {} is installed",
        COMPILERS.join(", ")
    )
}

/// The library file of the runtime for tests: the requested one, else the look-alike; `None` after [`skip`].
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

/// The runtime for tests; `None` after [`skip`]. If `ROCMFORGE_TEST_DEVICE` names a device as `NAME at PLACE`, any
/// other device is a failure.
pub fn runtime() -> Option<Runtime> {
    let path = library()?;
    let runtime = Runtime::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(
        named().is_some() || is_lookalike(&runtime),
        "the look-alike was built, but another runtime answers"
    );
    if let Some(wanted) = std::env::var_os("ROCMFORGE_TEST_DEVICE") {
        let device = runtime.describe(0).unwrap();
        let found = format!("{} at {}", device.name, device.pci);
        assert_eq!(
            Some(found.as_str()),
            wanted.to_str(),
            "the device is not the one that ROCMFORGE_TEST_DEVICE names"
        );
    }
    Some(runtime)
}

/// The requested runtime: if it is missing, tests fail and do not fall back.
pub fn named() -> Option<PathBuf> {
    std::env::var_os("ROCMFORGE_HIP_LIB").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// The CPU look-alike, built when missing or outdated; `None` without a compiler for it. `ROCMFORGE_LOOKALIKE` names a
/// copy that is already built.
pub fn lookalike() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUILT
        .get_or_init(|| {
            if let Some(path) = std::env::var_os("ROCMFORGE_LOOKALIKE") {
                return Some(path.into());
            }
            COMPILERS.iter().find(|compiler| Command::new(compiler).arg("--version").output().is_ok())?;
            // Waves of 32 lanes, unless the environment names another variant.
            let variant = std::env::var("ROCMFORGE_LOOKALIKE_VARIANT").unwrap_or_else(|_| "wave32".into());
            let output = Command::new(env!("CARGO"))
                .args(["xtask", "lookalike", &variant])
                .current_dir(env!("CARGO_MANIFEST_DIR"))
                .output()
                .expect("cargo cannot be run");
            let text = String::from_utf8_lossy(&output.stdout);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "building the look-alike failed: {errors}");
            let path = text.lines().last().map(PathBuf::from).unwrap_or_default();
            assert!(
                path.is_file(),
                "cargo xtask lookalike printed no library path at the end: {text}{errors}"
            );
            Some(path)
        })
        .as_deref()
}
