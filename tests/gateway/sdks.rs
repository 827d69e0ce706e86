//! The packages that people use: they know nothing of this project.

use std::path::{Path, PathBuf};
use std::process::Command;

use rocmforge_client::wire::{ChatMessage, GenerateRequest, Prompt};

use crate::common;
use crate::door::{CHATTY, Door};
use crate::rig::collect;

/// The packages, each of which the script uses.
const PACKAGES: [&str; 4] =
    ["openai==3.57.0", "anthropic==2.13.0", "ollama==0.6.3", "prometheus-client==0.26.0"];

/// Python with the packages, below the target directory; `None` after reporting that they cannot be installed.
fn python() -> Option<PathBuf> {
    let venv = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gateway-sdks");
    let (python, holds) = (venv.join("bin/python"), venv.join("holds.txt"));
    let want = PACKAGES.join("\n");
    if std::fs::read_to_string(&holds).is_ok_and(|text| text == want) {
        return Some(python);
    }
    let works = |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
    let made = works(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv));
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    if !made || !works(Command::new(&python).args(install).args(PACKAGES)) {
        common::not_run(&format!("{} cannot be installed", PACKAGES.join(", ")));
        return None;
    }
    std::fs::write(&holds, want).unwrap();
    Some(python)
}

#[test]
fn published_packages_get_the_daemons_answers_and_its_errors() {
    let Some(python) = python() else { return };
    let door = Door::open();
    let messages = vec![ChatMessage { role: "user".into(), content: "ab".into() }];
    let request = GenerateRequest { max_tokens: 8, ..GenerateRequest::new(CHATTY, Prompt::Chat(messages)) };
    let text = collect(&mut door.rig.client().generate(&request).unwrap()).unwrap().text;
    // The forged model's answer holds a NUL, which no argument may have.
    let text = serde_json::to_string(&text).unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/gateway/sdks.py");
    let base = format!("http://{}", door.address);
    let output =
        Command::new(python).arg(script).args([base.as_str(), CHATTY, text.as_str()]).output().unwrap();
    let (told, complaint) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{told}{complaint}");
    let used: Vec<String> = told.lines().map(|line| line.replace(' ', "==")).collect();
    assert_eq!(used, PACKAGES);
    door.rig.assert_idle();
}
