//! The HIP runtime that this system has, without a GPU: the daemon binds to it, and it reports that there is no device.

use std::path::{Path, PathBuf};
use std::process::Command;

use rocmforge::backend::doctor::{Report, SUBCOMMAND};
use rocmforge::backend::hip::{HipError, Library, LibraryError, Runtime};

use crate::common::skip;

/// The oldest supported version, 5.2, as runtimes encode it.
const VERSION_MIN: u32 = 50_200_000;

/// The runtime under the name that the system's loader finds; `None` after [`skip`].
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
    let version = library.version().expect("the runtime gave no version");
    println!("{}: version {version}", path.display());
    assert!(version >= VERSION_MIN, "{version}");
    match Runtime::open(&path) {
        Ok(runtime) => assert!(runtime.device_count() > 0 && runtime.version() == version),
        Err(error) => assert!(matches!(error, HipError::NoDevice), "{error}"),
    }
    if !Path::new("/dev/kfd").exists() {
        assert!(matches!(Runtime::open(&path), Err(HipError::NoDevice)), "a device opened without a driver");
    }
}

#[test]
fn the_doctor_names_it_and_what_it_sees() {
    let Some((path, library)) = installed() else { return };
    let output = Command::new(env!("CARGO_BIN_EXE_rocmforged"))
        .arg(SUBCOMMAND)
        .env("ROCMFORGE_HIP_LIB", &path)
        .output()
        .expect("the daemon did not start");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("text");
    let report = text
        .lines()
        .find_map(|line| line.strip_prefix("rocmforge-gpus "))
        .expect("the output has no report line");
    let report: Report = serde_json::from_str(report).expect("the report line is no valid report");
    let runtime = report
        .checks
        .iter()
        .find(|check| check.name == "HIP runtime")
        .expect("the report has no check of the HIP runtime");
    let number = library.version().expect("the runtime gave no version");
    let version = format!("version {}.{}.{}", number / 10_000_000, number / 100_000 % 100, number % 100_000);
    assert!(runtime.found.contains(&path.display().to_string()), "{runtime:?}");
    assert!(runtime.found.contains(&version), "{runtime:?}");
    assert_eq!(runtime.found.contains("sees no device"), report.gpus.is_empty(), "{report:?}");
}
