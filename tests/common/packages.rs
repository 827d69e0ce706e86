//! Published packages that tests install below the target directory, once for each list of them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use crate::common;

/// Two tests that need one list of packages emptied each other's directory.
static INSTALLING: Mutex<()> = Mutex::new(());

/// True if the program ends well.
pub fn works(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// A directory of that name in which `install` put these packages. `None` after saying what is missing.
pub fn installed(
    name: &str,
    packages: &[&str],
    needs: &str,
    install: impl Fn(&Path) -> bool,
) -> Option<PathBuf> {
    let _alone = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let holds = directory.join("holds.txt");
    let want = packages.join("\n");
    if std::fs::read_to_string(&holds).is_ok_and(|text| text == want) {
        return Some(directory);
    }
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).unwrap();
    if !install(&directory) {
        common::not_run(&format!("{} cannot be installed: {needs}", packages.join(", ")));
        return None;
    }
    std::fs::write(&holds, want).unwrap();
    Some(directory)
}

/// Python with the packages; `None` after reporting that they cannot be installed.
pub fn python(name: &str, packages: &[&str]) -> Option<PathBuf> {
    let needs = "they need python3 with venv, and a package registry";
    let directory = installed(name, packages, needs, |directory| {
        let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        works(Command::new("python3").args(["-m", "venv"]).arg(directory))
            && works(Command::new(directory.join("bin/python")).args(install).args(packages))
    });
    Some(directory?.join("bin/python"))
}
