//! Rules for every file of the project: length, words, a first line that says what the file is.

use crate::source::{files, root};

/// Most lines of a file; a longer file holds a second idea.
const LINES_MAX: usize = 600;

/// ARCHITECTURE.md has fewer lines than this: it is a map, not a book.
const ARCHITECTURE_LINES_MAX: usize = 200;

/// Paths that must exist, so that the layout stays.
const LAYOUT: [&str; 25] = [
    ".ci/run",
    "ARCHITECTURE.md",
    "Cargo.lock",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "PROTOCOL.md",
    "README.md",
    "client/src/main.rs",
    "client/src/wire",
    "deny.toml",
    "fuzz",
    "src/backend/cpu",
    "src/cache",
    "src/model/arch",
    "src/model/gguf",
    "src/model/template",
    "src/model/tokenizer",
    "src/scheduler",
    "src/session",
    "src/socket",
    "src/tensor",
    "systemd",
    "tests/golden",
    "tests/reference",
    "tests/scenario",
];

/// Words that no file may hold. Names of hosts that serve packages belong to the settings of package clients. The
/// others are paths of one machine, notes of unfinished work, and marks of an unfinished merge. Written in pieces, so
/// that this file does not hold them.
const FORBIDDEN: [[&str; 2]; 14] = [
    ["py", "pi.org"],
    ["pythonhos", "ted.org"],
    ["static.cr", "ates.io"],
    ["npm", "js.org"],
    ["deb.deb", "ian.org"],
    ["hugging", "face.co"],
    ["git", "hub.com"],
    ["/wo", "rk/"],
    ["/ro", "ot/"],
    ["is", "sue #"],
    ["FIX", "ME"],
    ["TO", "DO"],
    ["<<<<", "<<< "],
    [">>>>", ">>> "],
];

#[test]
fn files_are_short() {
    // The protocol's page is one idea at any length: the author of a decoder wants every byte in one place.
    let long: Vec<String> = files()
        .iter()
        .filter(|f| {
            [".rs", ".py", ".md", ".hip", ".h", ".cpp", ".cu"].iter().any(|end| f.path.ends_with(end))
        })
        .filter(|f| f.path != "PROTOCOL.md")
        .map(|f| (f.text.lines().count(), &f.path))
        .filter(|(lines, _)| *lines > LINES_MAX)
        .map(|(lines, path)| format!("{path}: {lines} lines"))
        .collect();
    assert!(long.is_empty(), "over {LINES_MAX} lines; move the second idea elsewhere:\n{}", long.join("\n"));
}

#[test]
fn words_are_the_projects_own() {
    let forbidden = FORBIDDEN.map(|word| word.concat());
    let mut faults = Vec::new();
    // Licence texts are others' words; cargo writes lock files.
    for file in files().iter().filter(|f| !f.path.starts_with("LICENSE") && !f.path.ends_with(".lock")) {
        for (n, line) in file.text.lines().enumerate() {
            let found = forbidden.iter().find(|word| line.contains(word.as_str()));
            if let Some(word) = found {
                faults.push(format!("{}:{}: {word}", file.path, n + 1));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn every_rust_file_says_what_it_is() {
    let silent: Vec<String> = files()
        .iter()
        .filter(|f| {
            f.path.ends_with(".rs")
                && !f.is_test()
                && !f.text.trim_start_matches("#![no_main]").trim_start().starts_with("//!")
        })
        .map(|f| f.path.clone())
        .collect();
    assert!(silent.is_empty(), "these start without a `//!` line: {silent:?}");
}

#[test]
fn tests_are_never_ignored() {
    let attribute = ["#[ig", "nore"].concat();
    let found: Vec<String> = files()
        .iter()
        .filter(|f| f.path.ends_with(".rs") && f.text.contains(&attribute))
        .map(|f| f.path.clone())
        .collect();
    assert!(found.is_empty(), "ignored tests in {found:?}");
}

#[test]
fn the_layout_stands() {
    let missing: Vec<&str> = LAYOUT.into_iter().filter(|path| !root().join(path).exists()).collect();
    assert!(missing.is_empty(), "missing: {missing:?}");
}

#[test]
fn the_map_is_short_and_names_every_layer() {
    let map = std::fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md can be read");
    let lines = map.lines().count();
    assert!(lines < ARCHITECTURE_LINES_MAX, "ARCHITECTURE.md has {lines} lines");
    let entries = std::fs::read_dir(root().join("src")).expect("src can be read").flatten();
    let folders: Vec<String> = entries
        .filter(|entry| entry.path().is_dir())
        .map(|entry| format!("src/{}", entry.file_name().to_string_lossy()))
        .collect();
    let unnamed: Vec<&String> = folders.iter().filter(|folder| !map.contains(folder.as_str())).collect();
    assert!(unnamed.is_empty(), "ARCHITECTURE.md does not name {unnamed:?}");
    // All that the map names exists, also what it names from `src` on.
    let named = map.split(|c: char| !(c.is_alphanumeric() || "/._-".contains(c)));
    let mut gone: Vec<&str> = named
        .map(|word| word.trim_end_matches(['.', '/']))
        .filter(|word| {
            ["src/", "client/", "xtask/", "tests/", "systemd/", "fuzz/"].iter().any(|at| word.starts_with(at))
        })
        .filter(|word| !root().join(word).exists())
        .collect();
    let layers = folders.iter().filter_map(|folder| folder.strip_prefix("src/"));
    let layers: Vec<String> = layers.map(|folder| format!("{folder}/")).collect();
    let below = map.split(['`', ' ', ',']).map(|word| word.split("::").next().unwrap_or(word));
    let below = below.filter(|word| layers.iter().any(|layer| word.starts_with(layer.as_str())));
    gone.extend(below.filter(|word| !root().join("src").join(word).exists()));
    assert!(gone.is_empty(), "ARCHITECTURE.md names paths that do not exist: {gone:?}");
}
