//! The programs of the parts: tests and measurements, built if out of date.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use xtask::error::{Error, Result};
use xtask::host;

/// Built programs, by name.
#[derive(Debug)]
pub struct Programs {
    files: HashMap<String, PathBuf>,
}

impl Programs {
    /// Builds tests with all arithmetic checks, and measurements like the released daemon; with `quick`, measurements
    /// are built like tests. Works without the network if all packages are present.
    ///
    /// # Errors
    /// [`Error::Command`] if they do not compile, [`Error::Unexpected`].
    pub fn build(tests: &[&str], benches: &[&str], quick: bool) -> Result<Self> {
        let mut files = HashMap::new();
        let profile = if quick { &["--profile", "dev"][..] } else { &[] };
        for (command, option, names, profile) in
            [("test", "--test", tests, &[][..]), ("bench", "--bench", benches, profile)]
        {
            let mut words = vec![command];
            words.extend(names.iter().flat_map(|name| [option, *name]));
            words.extend(profile);
            // Without a name, cargo would build all of them.
            if !names.is_empty() {
                collect(&words, &mut files)?;
            }
        }
        for name in tests.iter().chain(benches) {
            if !files.contains_key(*name) {
                return Err(Error::Unexpected { what: "cargo", text: format!("it did not build {name}") });
            }
        }
        Ok(Self { files })
    }

    /// A command for one program, run in the sources' root as cargo does.
    pub fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.files.get(name).map_or(Path::new(name), PathBuf::as_path));
        command.current_dir(host::root());
        command
    }
}

/// Builds the targets that cargo's arguments `words` name, first offline.
fn collect(words: &[&str], files: &mut HashMap<String, PathBuf>) -> Result<()> {
    if cargo(words, true, files).is_ok() {
        return Ok(());
    }
    host::check_interrupted()?;
    eprintln!("trying again with the network, in case packages are missing");
    cargo(words, false, files)
}

fn cargo(words: &[&str], offline: bool, files: &mut HashMap<String, PathBuf>) -> Result<()> {
    let mut command = host::cargo();
    command.args(words).args(["--workspace", "--no-run", "--message-format=json-render-diagnostics"]);
    if offline {
        command.arg("--offline");
    }
    let shown = host::shown(&command);
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(Error::io(shown.clone()))?;
    for line in child
        .stdout
        .take()
        .into_iter()
        .flat_map(|pipe| BufReader::new(pipe).lines())
        .map_while(|line| line.ok())
    {
        files.extend(executable(&line));
    }
    let status = child.wait().map_err(Error::io(shown.clone()))?;
    host::check_interrupted()?;
    if status.success() { Ok(()) } else { Err(Error::Command { command: shown, status }) }
}

/// The program that a line of cargo's output reports as built.
fn executable(line: &str) -> Option<(String, PathBuf)> {
    let message: Value = serde_json::from_str(line).ok()?;
    let is_one = message["reason"] == "compiler-artifact"
        && ["test", "bench"].iter().any(|kind| message["target"]["kind"][0] == *kind);
    let file = message["executable"].as_str().filter(|_| is_one)?;
    Some((message["target"]["name"].as_str()?.to_owned(), file.into()))
}

#[cfg(test)]
mod unit {
    #[test]
    fn only_built_tests_and_benches_are_taken() {
        let line = |kind: &str, file: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","target":{{"kind":["{kind}"],"name":"gpu"}},"executable":{file}}}"#
            )
        };
        let taken = super::executable(&line("test", r#""/t/gpu-1""#));
        assert_eq!(taken, Some(("gpu".into(), "/t/gpu-1".into())));
        assert_eq!(super::executable(&line("bin", r#""/t/gpu""#)), None);
        assert_eq!(super::executable(&line("bench", "null")), None);
        assert_eq!(super::executable("no message"), None);
    }
}
