//! The demo names what a machine lacks before it builds or fetches anything.

#![allow(clippy::unwrap_used)] // tests fail by panicking

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// Exit code and error output of the demo on a machine with these programs alone, and with no model.
fn demo(programs: &[(&str, &str)], words: &[&str]) -> (Option<i32>, String) {
    let dir = tempfile::tempdir().unwrap();
    for (name, script) in programs {
        let path = dir.path().join(name);
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let target = dir.path().join("target");
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .arg("demo")
        .args(words)
        .env("PATH", dir.path())
        .env("CARGO", dir.path().join("cargo"))
        .env("CARGO_TARGET_DIR", &target)
        .env("ROCMFORGE_MODELS_CACHE", dir.path().join("models"))
        .output()
        .unwrap();
    assert!(!Path::new(&target).exists(), "something was built");
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

const WORKS: &str = "#!/bin/sh\n";
const FAILS: &str = "#!/bin/sh\nexit 1\n";

#[test]
fn programs_that_are_missing_are_named_with_their_packages() {
    let lacks = |programs: &str, packages: &str| {
        format!(
            "xtask: the demo needs {programs}, which this machine lacks; on Debian and Ubuntu, `sudo apt install {packages}` and run this again\n"
        )
    };
    let all = lacks("cc, python3, pip", "gcc libc6-dev python3 python3-pip");
    assert_eq!(demo(&[], &[]), (Some(1), all));
    assert_eq!(demo(&[("cc", WORKS), ("python3", FAILS)], &[]), (Some(1), lacks("pip", "python3-pip")));
    let own = ["--model", "own.gguf"];
    assert_eq!(demo(&[], &own), (Some(1), lacks("cc", "gcc libc6-dev")), "an own model needs no Python");
}

#[test]
fn a_machine_with_all_of_them_goes_on_to_the_build() {
    // The build is refused here: its program is another one.
    let (code, said) = demo(&[("cc", WORKS), ("cargo", FAILS)], &["--model", "own.gguf"]);
    assert_eq!(code, Some(1));
    assert!(said.contains("== building") && said.contains("build --release"), "{said}");
}
