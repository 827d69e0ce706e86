//! Dependencies: none that is not used, and those the project is built on each have a test that needs them.

use std::collections::BTreeMap;

use crate::source::{Source, files, root};

/// A crate the project is built on, where it works, and the test that fails without it.
struct Pillar {
    name: &'static str,
    /// Code that names it: the test fails when none does.
    works_in: &'static str,
    /// File and function of a test that needs it.
    test: (&'static str, &'static str),
}

const PILLARS: [Pillar; 0] = [];

#[test]
fn pillars_work_and_have_their_test() {
    let all = files();
    let mut faults = Vec::new();
    for pillar in &PILLARS {
        let works = all.iter().any(|f| {
            f.path.starts_with(pillar.works_in)
                && f.code().iter().any(|(_, code)| names_crate(code, pillar.name))
        });
        if !works {
            faults.push(format!("{}: does no work in {}", pillar.name, pillar.works_in));
        }
        let (path, function) = pillar.test;
        let header = format!("fn {function}(");
        let has_test = |f: &Source| {
            let lines: Vec<&str> = f.text.lines().collect();
            let at = lines.iter().position(|line| line.contains(&header));
            at.is_some_and(|at| lines[at.saturating_sub(4)..at].iter().any(|line| line.contains("test")))
        };
        if !all.iter().any(|f| f.path == path && has_test(f)) {
            faults.push(format!("{}: {path} has no test {function}", pillar.name));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn every_dependency_is_used() {
    let all = files();
    let mut idle = Vec::new();
    for (manifest, code_in) in
        [("Cargo.toml", "src/"), ("client/Cargo.toml", "client/src/"), ("xtask/Cargo.toml", "xtask/src/")]
    {
        for name in dependencies(manifest) {
            let used = all
                .iter()
                .filter(|f| f.path.starts_with(code_in))
                .any(|f| f.code().iter().any(|(_, code)| names_crate(code, &name)));
            if !used {
                idle.push(format!("{manifest}: {name}"));
            }
        }
    }
    assert!(idle.is_empty(), "named as dependencies and not used:\n{}", idle.join("\n"));
}

#[test]
fn exactly_one_advisory_is_excepted() {
    let text = std::fs::read_to_string(root().join("deny.toml")).expect("deny.toml can be read");
    let deny: toml::Table = text.parse().expect("deny.toml is TOML");
    let ignored = deny["advisories"]["ignore"].as_array().expect("advisories.ignore is a list");
    let ids: Vec<&str> = ignored.iter().filter_map(|entry| entry["id"].as_str()).collect();
    assert_eq!(ids, ["RUSTSEC-2025-0141"]);
    assert!(
        ignored[0]["reason"].as_str().is_some_and(|reason| reason.len() > 20),
        "the exception has its reason"
    );
}

/// Names under `[dependencies]`, as the code writes them.
fn dependencies(manifest: &str) -> Vec<String> {
    let text = std::fs::read_to_string(root().join(manifest)).expect("a manifest can be read");
    let table: toml::Table = text.parse().expect("a manifest is TOML");
    let names: BTreeMap<String, ()> = table["dependencies"]
        .as_table()
        .expect("dependencies are a table")
        .keys()
        .map(|name| (name.replace('-', "_"), ()))
        .collect();
    assert!(!names.is_empty(), "{manifest} has dependencies");
    names.into_keys().collect()
}

fn names_crate(code: &str, name: &str) -> bool {
    let word = name.replace('-', "_");
    let part_of_word = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(&word).any(|(start, _)| {
        !code[..start].ends_with(part_of_word) && !code[start + word.len()..].starts_with(part_of_word)
    })
}
