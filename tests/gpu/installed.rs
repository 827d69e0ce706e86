//! The HIP runtime that this system has, as far as it goes without a GPU: ours binds to it, and it says that there is no device.

use std::path::{Path, PathBuf};
use std::process::Command;

use rocmforge::backend::doctor::{Report, SUBCOMMAND};
use rocmforge::backend::hip::{HipError, Library, LibraryError, Runtime};

use crate::common::skip;

/// The oldest that is supported, 5.2, as runtimes write it.
const VERSION_MIN: u32 = 50_200_000;

/// By the name under which the system's loader finds it; `None` after [`skip`].
fn installed() -> Option<(PathBuf, Library)> {
    for ending in [".8", ".7", ".6", "", ".5"] {
        let path = PathBuf::from(format!("libamdhip64.so{ending}"));
        match Library::open(&path) {
            Ok(library) => return Some((path, library)),
            Err(LibraryError::NotFound { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    skip("no HIP runtime is installed (Debian package libamdhip64-5)");
    None
}

#[test]
fn it_has_every_function_and_says_when_there_is_no_device() {
    let Some((path, library)) = installed() else { return };
    let version = library.version().expect("it says its version without a device");
    println!("{}: version {version}", path.display());
    assert!(version >= VERSION_MIN, "{version}");
    match Runtime::open(&path) {
        Ok(runtime) => assert!(runtime.device_count() > 0 && runtime.version() == version),
        Err(error) => assert!(matches!(error, HipError::NoDevice), "{error}"),
    }
    if !Path::new("/dev/kfd").exists() {
        assert!(matches!(Runtime::open(&path), Err(HipError::NoDevice)), "a device without its driver");
    }
}

#[test]
fn the_doctor_names_it_and_what_it_sees() {
    let Some((path, library)) = installed() else { return };
    let output = Command::new(env!("CARGO_BIN_EXE_rocmforged"))
        .arg(SUBCOMMAND)
        .env("ROCMFORGE_HIP_LIB", &path)
        .output()
        .expect("the daemon's program starts");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("text");
    let report =
        text.lines().find_map(|line| line.strip_prefix("rocmforge-gpus ")).expect("a line with the report");
    let report: Report = serde_json::from_str(report).expect("a report");
    let runtime =
        report.checks.iter().find(|check| check.name == "HIP runtime").expect("it is always looked at");
    let number = library.version().expect("as above");
    let version = format!("version {}.{}.{}", number / 10_000_000, number / 100_000 % 100, number % 100_000);
    assert!(runtime.found.contains(&path.display().to_string()), "{runtime:?}");
    assert!(runtime.found.contains(&version), "{runtime:?}");
    assert_eq!(runtime.found.contains("sees no device"), report.gpus.is_empty(), "{report:?}");
}
