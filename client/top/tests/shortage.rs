//! The program on a machine that has no thread left for it.

#![allow(clippy::unwrap_used)] // a test fails by panicking

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// `nobody`: the kernel does not count the processes of root.
const NOBODY: u32 = 65534;

#[test]
fn without_a_thread_it_ends_with_an_error_that_says_so() {
    let dir = tempfile::tempdir().unwrap();
    // The folder of the build may be closed to other users.
    let program = dir.path().join("program");
    fs::copy(env!("CARGO_BIN_EXE_rocmforge-top"), &program).unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    for arguments in [&["--once"][..], &["--json"]] {
        let mut command = Command::new("prlimit");
        command.arg("--nproc=1").arg(&program).args(["--socket", "/none"]).args(arguments).current_dir("/");
        if fs::metadata("/proc/self").unwrap().uid() == 0 {
            command.uid(NOBODY).gid(NOBODY);
        }
        let output = command.output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(
            stderr.starts_with("rocmforge-top: no thread could be started") && stderr.contains("ulimit -u"),
            "{stderr}"
        );
    }
}
