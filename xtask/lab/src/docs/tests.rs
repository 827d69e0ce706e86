//! Tests that pages render without a warning and cover all of their sources.

#![allow(clippy::expect_used)] // tests fail by panicking

use std::collections::BTreeSet;
use std::process::Command;

use xtask::{host, install};

use super::{config, files, write};

fn skip(why: &str) {
    eprintln!("rocmforge-test-skipped: documentation: {why}");
    assert!(!host::strict(), "may not be skipped here");
}

fn example() -> String {
    std::fs::read_to_string(host::root().join("systemd/config.toml")).expect("the example")
}

#[test]
fn every_page_renders_without_a_warning() {
    if !host::works(Command::new("groff").arg("--version")) {
        return skip("groff is not installed (Debian package groff-base)");
    }
    let dir = tempfile::tempdir().expect("a folder");
    assert_eq!(write(dir.path()).expect("files"), files().expect("files").len());
    for file in files().expect("files").iter().filter(|file| file.path.starts_with("man/")) {
        let output = Command::new("groff")
            .args(["-man", "-Tutf8", "-ww", "-rLL=100n", "-P-cbou"])
            .arg(dir.path().join(&file.path))
            .output()
            .expect("groff runs");
        let warnings = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && warnings.is_empty(), "{}: {warnings}", file.path);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("NAME") && text.contains("SEE ALSO"), "{}: {text}", file.path);
        assert!(text.lines().count() > 10, "{}: {text}", file.path);
    }
}

#[test]
fn every_subcommand_has_a_page() {
    let pages: BTreeSet<String> = files().expect("files").into_iter().map(|file| file.path).collect();
    for page in ["rocmforged.8", "rocmforge-gateway.8", "rocmforge-client.1", "rocmforge-top.1"] {
        assert!(pages.contains(&format!("man/{page}")), "{pages:?}");
    }
    let help = rocmforge_client::cli::command().render_long_help().to_string();
    let commands =
        help.split("Commands:\n").nth(1).and_then(|rest| rest.split("\n\n").next()).expect("a list");
    let names: Vec<&str> = commands
        .lines()
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .collect();
    assert!(names.len() > 15, "{help}");
    for name in names {
        assert!(pages.contains(&format!("man/rocmforge-client-{name}.1")), "{name} has no page");
    }
}

#[test]
fn the_page_of_the_configuration_has_every_key_and_no_other() {
    let example = example();
    let text: String = example
        .lines()
        .map(|line| line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(line))
        .filter(|line| !line.starts_with('#'))
        .map(|line| format!("{line}\n"))
        .collect();
    let parsed: toml::Table = text.parse().expect("the example is TOML");
    let mut keys = BTreeSet::new();
    for (name, value) in &parsed {
        match value {
            toml::Value::Table(table) => keys.extend(table.keys().map(|key| format!("{name}.{key}"))),
            _ => drop(keys.insert(format!(".{name}"))),
        }
    }
    let entries = config::entries(&example);
    let told: Vec<String> = entries
        .iter()
        .flat_map(|entry| entry.keys.iter().map(|(key, _)| format!("{}.{key}", entry.table)))
        .collect();
    assert_eq!(told.iter().cloned().collect::<BTreeSet<_>>(), keys);
    assert_eq!(told.len(), keys.len(), "none twice");
    let page = config::page(&entries);
    for entry in entries.iter().filter(|entry| !entry.keys.is_empty()) {
        assert!(!entry.text.is_empty(), "{:?} is not explained", entry.keys);
        for (key, _) in &entry.keys {
            assert!(page.contains(&format!("\\fB{key}\\fR = ")), "{key}");
        }
    }
}

#[test]
fn keys_that_stand_together_share_what_is_said() {
    let entries = config::entries("# About.\n# Both.\n\n# One\n# more.\na = 1\n#b = 2\n[t]\n# C.\n#c = 3\n");
    let short: Vec<_> = entries.iter().map(|e| (e.table.as_str(), e.keys.len(), e.text.as_str())).collect();
    assert_eq!(short, [("", 0, "About.\nBoth.\n"), ("", 2, "One\nmore.\n"), ("t", 1, "C.\n")]);
}

#[test]
fn completions_are_what_their_shells_take() {
    let dir = tempfile::tempdir().expect("a folder");
    write(dir.path()).expect("files");
    let of = |shell: &str| dir.path().join("completions").join(shell);
    for program in ["rocmforged", "rocmforge-gateway", "rocmforge-client", "rocmforge-top"] {
        let script = of("bash").join(program);
        let output = Command::new("bash")
            .arg("-c")
            .arg(format!("set -e; source '{}'; complete -p {program}", script.display()))
            .output()
            .expect("bash runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains(program), "{output:?}");
        assert!(of("zsh").join(format!("_{program}")).is_file());
        assert!(of("fish").join(format!("{program}.fish")).is_file());
    }
    // Hidden subcommands are not shown. Models are those that `rocmforge-client list` prints.
    let ask = r#"source "$1"; shift; COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
        rocmforge-client() { printf 'NAME   STATE\nstory  mapped\nsmall  registered\n$(touch ran)  mapped\n'; }
        timeout() { shift; "$@"; }
        function=$(complete -p rocmforge-client); function=${function#*-F }
        ${function%% *} rocmforge-client "${@: -1}" "${@: -2:1}"; echo "${COMPREPLY[*]}""#;
    for (begun, whole) in [
        ("resi", "residency"),
        ("ben", "bench"),
        ("run --temperat", "--temperature"),
        ("sessions for", "forget"),
        ("unload st", "story"),
        ("run s", "story small"),
        ("run $", "\\$\\(touch\\ ran\\)"),
    ] {
        let script = of("bash").join("rocmforge-client");
        let mut command = Command::new("bash");
        command
            .current_dir(dir.path())
            .args(["-c", ask, "bash"])
            .arg(script)
            .arg("rocmforge-client")
            .args(begun.split(' '));
        let text = String::from_utf8(command.output().expect("bash runs").stdout).expect("text");
        assert_eq!(text.trim(), whole, "{begun}");
    }
    assert!(!dir.path().join("ran").exists(), "a model's name was run");
}

#[test]
fn every_program_page_and_completion_is_in_the_package() {
    let manifest = std::fs::read_to_string(host::root().join("Cargo.toml")).expect("Cargo.toml");
    let sources: Vec<String> =
        install::listed(&manifest).expect("a list").into_iter().map(|file| file.source).collect();
    for program in ["rocmforged", "rocmforge-gateway", "rocmforge-client", "rocmforge-top"] {
        assert!(sources.contains(&format!("target/release/{program}")), "{sources:?}");
    }
    for file in files().expect("documentation") {
        let compressed = if file.path.starts_with("man/") { ".gz" } else { "" };
        let path = format!("target/release/docs/{}{compressed}", file.path);
        let fits = |source: &String| match source.split_once('*') {
            Some((begin, end)) => path.starts_with(begin) && path.ends_with(end),
            None => *source == path,
        };
        assert_eq!(sources.iter().filter(|source| fits(source)).count(), 1, "{path} in {sources:?}");
    }
}
