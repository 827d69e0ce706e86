//! The units as systemd reads them, and the choice of drop-ins that fit its version.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common;

fn units() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd")
}

/// Version of the installed systemd; `None` after saying that the test is skipped.
fn systemd() -> Option<u32> {
    let Ok(output) = Command::new("systemd-analyze").arg("--version").output() else {
        common::skip("systemd-analyze is not installed, so the units are not verified");
        return None;
    };
    let text = String::from_utf8(output.stdout).unwrap();
    let number = text.split_whitespace().nth(1).and_then(|number| number.parse().ok());
    Some(number.unwrap_or_else(|| panic!("no version: {text}")))
}

const UNITS: [&str; 3] = ["rocmforged.socket", "rocmforged.service", "rocmforge-metrics.service"];

/// The units as installed into a directory, but for the programs: ours are where the units look once installed only, and one that
/// is there stands for them.
fn install() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in UNITS {
        let text = fs::read_to_string(units().join(name)).unwrap();
        let here = text.replace("ExecStart=/usr/bin/rocmforge", "ExecStart=/bin/true /usr/bin/rocmforge");
        assert_eq!(here == text, name.ends_with(".socket"), "{name}");
        fs::write(dir.path().join(name), here).unwrap();
    }
    dir
}

/// What `systemd-analyze verify` makes of them: nothing, or what it complains of.
fn verify(dir: &Path) -> Option<String> {
    let output = Command::new("systemd-analyze")
        .args(["verify", "--recursive-errors=yes", "--man=no"])
        .args(UNITS.map(|name| dir.join(name)))
        .output()
        .unwrap();
    let says = String::from_utf8_lossy(&output.stderr).into_owned();
    (!output.status.success() || says.contains("rocmforge")).then_some(says)
}

/// Runs the script of the package; what it chose.
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
    // The check can fail: an unknown key does.
    let path = dir.path().join("rocmforged.service");
    let whole = fs::read_to_string(&path).unwrap();
    fs::write(&path, whole.replace("[Service]", "[Service]\nWatchdogSecs=20s")).unwrap();
    assert!(verify(dir.path()).is_some_and(|says| says.contains("WatchdogSecs")), "an unknown key passes");
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
fn drop_ins_are_chosen_by_version_and_taken_away_again() {
    let dir = tempfile::tempdir().unwrap();
    let all = ["50-systemd-253.conf", "50-systemd-254.conf", "50-systemd-258.conf"];
    assert_eq!(choose(dir.path(), "252"), [""; 0]);
    assert!(!dir.path().join("rocmforged.service.d").exists(), "an empty directory is no choice");
    assert_eq!(choose(dir.path(), "253"), all[..1]);
    assert_eq!(choose(dir.path(), "261"), all);
    let others = dir.path().join("rocmforged.service.d/other.conf");
    fs::write(&others, "").unwrap();
    assert_eq!(choose(dir.path(), "257"), [all[0], all[1], "other.conf"], "an older systemd came back");
    assert_eq!(choose(dir.path(), "no number"), [all[0], all[1], "other.conf"], "nothing is touched");
    for name in &all[..2] {
        let text = fs::read_to_string(dir.path().join("rocmforged.service.d").join(name)).unwrap();
        assert!(text.contains("[Service]"), "{name} leads somewhere");
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
                // A reason holds for what follows it without a blank line between.
                None => reason = false,
                Some('[') => reason = false,
                Some(_) if reason || explains_itself(line) => {}
                Some(_) => without.push(format!("{}: {line}", file.display())),
            }
        }
    }
    assert!(without.is_empty(), "{}", without.join("\n"));
}

/// What is to be said of these is in their own line.
fn explains_itself(line: &str) -> bool {
    ["Description=", "Wants=", "After=", "Also=", "WantedBy=", "ListenStream=", "FileDescriptorName="]
        .iter()
        .any(|key| line.starts_with(key))
}
