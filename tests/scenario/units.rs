//! The units as systemd reads them.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common;

#[test]
fn systemd_accepts_the_units() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        common::skip("systemd-analyze is not installed, so the units are not verified");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd");
    let socket = fs::read_to_string(units.join("rocmforged.socket")).unwrap();
    let service = fs::read_to_string(units.join("rocmforged.service")).unwrap();
    // The one path that exists only once installed.
    let program = env!("CARGO_BIN_EXE_rocmforged");
    assert!(service.contains("ExecStart=/usr/bin/rocmforged --config"));
    let service = service.replace("/usr/bin/rocmforged", program);
    fs::write(dir.path().join("rocmforged.socket"), socket).unwrap();
    fs::write(dir.path().join("rocmforged.service"), service).unwrap();
    let verify = || {
        let output = Command::new("systemd-analyze")
            .args(["verify", "--recursive-errors=yes", "--man=no"])
            .arg(dir.path().join("rocmforged.service"))
            .arg(dir.path().join("rocmforged.socket"))
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (accepted, says) = verify();
    assert!(accepted, "{says}");
    assert!(!says.contains("rocmforged"), "{says}");
    // The check can fail: an unknown key does.
    let path = dir.path().join("rocmforged.service");
    let broken = fs::read_to_string(&path).unwrap().replace("[Service]", "[Service]\nWatchdogSecs=20s");
    fs::write(&path, broken).unwrap();
    let (accepted, says) = verify();
    assert!(!accepted || says.contains("WatchdogSecs"), "an unknown key passes: {says}");
}
