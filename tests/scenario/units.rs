//! The units as systemd reads them, and the choice of drop-ins for its version.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common;

fn units() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd")
}

/// Version of the installed systemd; `None` after reporting that the test is skipped.
fn systemd() -> Option<u32> {
    let Ok(output) = Command::new("systemd-analyze").arg("--version").output() else {
        common::skip("systemd-analyze is not installed, so the units are not verified");
        return None;
    };
    let text = String::from_utf8(output.stdout).unwrap();
    let number = text.split_whitespace().nth(1).and_then(|number| number.parse().ok());
    Some(number.unwrap_or_else(|| panic!("no version: {text}")))
}

const UNITS: [&str; 6] = [
    "rocmforge.slice",
    "rocmforged.socket",
    "rocmforged.service",
    "rocmforge-metrics.service",
    "rocmforge-gateway.socket",
    "rocmforge-gateway.service",
];

/// The units, written to a directory with /bin/true in place of the programs: the real ones exist only once installed.
fn install() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in UNITS {
        let text = fs::read_to_string(units().join(name)).unwrap();
        let here = text.replace("ExecStart=/usr/bin/rocmforge", "ExecStart=/bin/true /usr/bin/rocmforge");
        assert_eq!(here == text, !name.ends_with(".service"), "{name}");
        fs::write(dir.path().join(name), here).unwrap();
    }
    dir
}

/// The complaints of `systemd-analyze verify`; `None` without complaints.
fn verify(dir: &Path) -> Option<String> {
    let output = Command::new("systemd-analyze")
        .args(["verify", "--recursive-errors=yes", "--man=no"])
        .args(UNITS.map(|name| dir.join(name)))
        .output()
        .unwrap();
    let says = String::from_utf8_lossy(&output.stderr).into_owned();
    (!output.status.success() || says.contains("rocmforge")).then_some(says)
}

/// Runs the package's script; returns the names of the chosen drop-ins.
fn choose(dir: &Path, version: &str) -> Vec<String> {
    let output = Command::new(units().join("choose-drop-ins"))
        .arg(units().join("drop-ins/version"))
        .arg(dir)
        .arg(version)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let chosen = fs::read_dir(dir.join("rocmforged.service.d")).into_iter().flatten();
    let names: BTreeSet<_> = chosen.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.into_iter().collect()
}

fn drop_ins(kind: &str) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        fs::read_dir(units().join("drop-ins").join(kind)).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths
}

#[test]
fn systemd_accepts_the_units_with_the_drop_ins_of_its_version() {
    let Some(version) = systemd() else { return };
    let dir = install();
    assert_eq!(verify(dir.path()), None);
    choose(dir.path(), &version.to_string());
    assert_eq!(verify(dir.path()), None, "with the drop-ins of version {version}");
    // Checks the check: an unknown key must fail.
    let path = dir.path().join("rocmforged.service");
    let whole = fs::read_to_string(&path).unwrap();
    fs::write(&path, whole.replace("[Service]", "[Service]\nWatchdogSecs=20s")).unwrap();
    assert!(
        verify(dir.path()).is_some_and(|says| says.contains("WatchdogSecs")),
        "an unknown key was accepted"
    );
}

#[test]
fn systemd_accepts_the_units_of_a_users_own_daemon() {
    if systemd().is_none() {
        return;
    }
    let (dir, runtime) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let names = ["rocmforged.socket", "rocmforged.service"];
    for name in names {
        let text = fs::read_to_string(units().join("user").join(name)).unwrap();
        let here = text.replace("ExecStart=/usr/bin/rocmforge", "ExecStart=/bin/true /usr/bin/rocmforge");
        fs::write(dir.path().join(name), here).unwrap();
    }
    let verify = || {
        let mut command = Command::new("systemd-analyze");
        command.args(["--user", "verify", "--recursive-errors=no", "--man=no"]);
        command.args(names.map(|name| dir.path().join(name))).env("XDG_RUNTIME_DIR", runtime.path());
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (accepted, says) = verify();
    assert!(accepted && !says.contains("rocmforge"), "{says}");
    // Checks the check: an unknown key must be named.
    let path = dir.path().join("rocmforged.service");
    let whole = fs::read_to_string(&path).unwrap();
    fs::write(&path, whole.replace("[Service]", "[Service]\nWatchdogSecs=20s")).unwrap();
    assert!(verify().1.contains("WatchdogSecs"), "an unknown key was accepted");
}

#[test]
fn systemd_accepts_each_drop_in_for_special_machines() {
    if systemd().is_none() {
        return;
    }
    for path in drop_ins("optional") {
        let dir = install();
        let folder = dir.path().join("rocmforged.service.d");
        fs::create_dir(&folder).unwrap();
        fs::copy(&path, folder.join("special.conf")).unwrap();
        assert_eq!(verify(dir.path()), None, "{}", path.display());
    }
}

#[test]
fn the_gateways_unit_is_exposed_to_little() {
    if systemd().is_none() {
        return;
    }
    let dir = install();
    let unit = dir.path().join("rocmforge-gateway.service");
    // The threshold is in tenths: 1.5 of 10.
    let output = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--no-pager", "--threshold=15"])
        .arg(&unit)
        .output()
        .unwrap();
    let says = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", says.lines().last().unwrap_or_default());
}

#[test]
fn drop_ins_are_chosen_by_version_and_taken_away_again() {
    let dir = tempfile::tempdir().unwrap();
    let all = ["50-systemd-253.conf", "50-systemd-254.conf", "50-systemd-258.conf"];
    assert_eq!(choose(dir.path(), "252"), [""; 0]);
    assert!(!dir.path().join("rocmforged.service.d").exists(), "an empty directory of drop-ins was left");
    assert_eq!(choose(dir.path(), "253"), all[..1]);
    assert_eq!(choose(dir.path(), "261"), all);
    let others = dir.path().join("rocmforged.service.d/other.conf");
    fs::write(&others, "").unwrap();
    assert_eq!(
        choose(dir.path(), "257"),
        [all[0], all[1], "other.conf"],
        "the choice for an older systemd is wrong"
    );
    assert_eq!(
        choose(dir.path(), "no number"),
        [all[0], all[1], "other.conf"],
        "an invalid version changed the drop-ins"
    );
    for name in &all[..2] {
        let text = fs::read_to_string(dir.path().join("rocmforged.service.d").join(name)).unwrap();
        assert!(text.contains("[Service]"), "{name} does not link to a drop-in");
    }
}

#[test]
fn every_setting_has_its_reason() {
    let mut files = UNITS.map(|name| units().join(name)).to_vec();
    files.extend(drop_ins("version"));
    files.extend(drop_ins("optional"));
    let mut without = Vec::new();
    for file in &files {
        let text = fs::read_to_string(file).unwrap();
        let mut reason = false;
        for line in text.lines() {
            match line.chars().next() {
                Some('#') => reason = true,
                // A reason covers the lines after it up to a blank line.
                None => reason = false,
                Some('[') => reason = false,
                Some(_) if reason || explains_itself(line) => {}
                Some(_) => without.push(format!("{}: {line}", file.display())),
            }
        }
    }
    assert!(without.is_empty(), "{}", without.join("\n"));
}

/// Keys whose value is explanation enough.
fn explains_itself(line: &str) -> bool {
    ["Description=", "Wants=", "After=", "Also=", "WantedBy=", "ListenStream=", "FileDescriptorName="]
        .iter()
        .any(|key| line.starts_with(key))
}
