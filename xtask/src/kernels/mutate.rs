//! `cargo xtask kernels --mutate`: changes one number or operator of a kernel file, runs the kernel tests on a look-alike built from
//! that, and expects them to fail. Whatever survives is a line that no test holds.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::{Variant, lookalike, sources};
use crate::error::{Error, Result};
use crate::host;

/// A changed loop may have no end. The tests take a minute.
const PATIENCE: Duration = Duration::from_secs(600);

/// What the CPU never compiles.
const OTHER_MACHINES: [&str; 2] = ["prelude/amd", "prelude/nvidia"];

/// Operators and what they become.
const OPERATORS: [(&str, &str); 8] = [
    (" + ", " - "),
    (" - ", " + "),
    (" * ", " + "),
    (" < ", " <= "),
    (" <= ", " < "),
    (" > ", " >= "),
    (" == ", " != "),
    (" && ", " || "),
];

/// Tests by the folders and files they are about: these run first, then all.
const FIRST: [(&str, &str); 12] = [
    ("gemv", "matmul::"),
    ("gemm", "matmul::"),
    ("dequant", "matmul::layout"),
    ("repack", "matmul::layout"),
    ("quant/", "matmul::"),
    ("attn", "attention::"),
    ("attention/", "attention::"),
    ("sampl", "sample::"),
    ("embed", "embed::"),
    ("rope", "rope::"),
    ("route", "experts::"),
    ("combine", "experts::"),
];

/// A place in a text and what stands there instead.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Change {
    start: usize,
    end: usize,
    becomes: String,
}

/// `rounds` changes in each file whose path contains one of `names`, or in every file when there are none.
///
/// # Errors
/// [`Error::Survived`], those of building.
pub fn run(names: &[String], rounds: u32) -> Result<()> {
    let root = host::target_dir().join("mutants");
    let dir = root.join("kernels");
    let mut survivors = Vec::new();
    let files = sources::inputs(&sources::dir())?;
    let wanted = |name: &str| names.is_empty() || names.iter().any(|part| name.contains(part.as_str()));
    copy(&dir)?;
    for file in files {
        let name = file.strip_prefix(sources::dir()).unwrap_or(&file).to_string_lossy().into_owned();
        if !wanted(&name) || OTHER_MACHINES.iter().any(|others| name.starts_with(others)) {
            continue;
        }
        let text = fs::read_to_string(&file).map_err(Error::at(&file))?;
        let changes = changes(&text);
        if changes.is_empty() {
            println!("{name}: nothing to change; its headers have it");
        }
        for change in (0..rounds).filter_map(|round| pick(&name, round, &changes)) {
            let shown = show(&name, &text, change);
            let changed = format!("{}{}{}", &text[..change.start], change.becomes, &text[change.end..]);
            let place = dir.join(&name);
            fs::write(&place, changed).map_err(Error::at(&place))?;
            let started = Instant::now();
            let fate = fate(&root, &name)?;
            println!("{shown}: {} ({} s)", fate.unwrap_or("SURVIVED"), started.elapsed().as_secs());
            if fate.is_none() {
                survivors.push(shown);
            }
            fs::write(&place, &text).map_err(Error::at(&place))?;
        }
    }
    if survivors.is_empty() { Ok(()) } else { Err(Error::Survived { changes: survivors.join("\n  ") }) }
}

/// The kernels as they are, to be changed one file at a time.
fn copy(to: &Path) -> Result<()> {
    let from = sources::dir();
    let mut files = sources::inputs(&from)?;
    files.extend(
        ["host.h", "host_matrix.h", "nvidia.h", "nvidia_matrix.h"]
            .map(|name| from.join("prelude").join(name)),
    );
    for file in files {
        let place = to.join(file.strip_prefix(&from).unwrap_or(&file));
        if let Some(folder) = place.parent() {
            fs::create_dir_all(folder).map_err(Error::at(folder))?;
        }
        fs::copy(&file, &place).map_err(Error::at(&place))?;
    }
    Ok(())
}

/// What noticed the change of `name`; `None` when nothing did.
fn fate(root: &Path, name: &str) -> Result<Option<&'static str>> {
    let into = root.join("lookalike");
    let library = match lookalike::build_from(root, &into, Variant::Wave32) {
        Ok(library) => library,
        Err(Error::Command { .. }) => return Ok(Some("the compiler refuses it")),
        Err(error) => return Err(error),
    };
    let first = FIRST.iter().find(|(part, _)| name.contains(part)).map(|(_, tests)| *tests);
    for tests in first.into_iter().chain([""]) {
        if !tests_pass(&library, tests)? {
            return Ok(Some("the tests fail"));
        }
    }
    Ok(None)
}

fn tests_pass(library: &PathBuf, filter: &str) -> Result<bool> {
    let mut command = host::cargo();
    command
        .args(["test", "--quiet", "--package", "rocmforge", "--test", "kernels", "--", filter])
        .env("ROCMFORGE_HIP_LIB", library)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut child = command.spawn().map_err(Error::io("cargo test"))?;
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().map_err(Error::io("cargo test"))? {
            return Ok(status.success());
        }
        let interrupted = host::check_interrupted();
        if interrupted.is_err() || started.elapsed() > PATIENCE {
            // It is gone already, or goes now.
            let _ = child.kill();
            let _ = child.wait();
            return interrupted.map(|()| false);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// One of `changes`, another in each round and the same on every machine.
fn pick<'a>(name: &str, round: u32, changes: &'a [Change]) -> Option<&'a Change> {
    let digest = Sha256::digest(format!("{name} {round}"));
    let number = digest.iter().take(4).fold(0usize, |sum, byte| sum << 8 | usize::from(*byte));
    changes.get(number.checked_rem(changes.len())?)
}

fn show(name: &str, text: &str, change: &Change) -> String {
    let line = text[..change.start].matches('\n').count() + 1;
    let code = text.lines().nth(line - 1).unwrap_or_default().trim();
    format!("{name}:{line}: {:?} -> {:?} in {code}", &text[change.start..change.end], change.becomes)
}

/// All changes there are: of numbers and of operators, in code. Bounds of launches (`KERNEL(256, ...`), sizes of alignments and
/// lines for the preprocessor are left alone: most of these change nothing that a kernel computes.
fn changes(text: &str) -> Vec<Change> {
    let mut found = Vec::new();
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let code = line.split("//").next().unwrap_or_default();
        let is_left = code.starts_with('#')
            || ["KERNEL(", "static_assert", "alignas"].iter().any(|word| code.contains(word));
        if !is_left {
            found.extend(numbers(code).chain(operators(code)).map(|change| Change {
                start: change.start + start,
                end: change.end + start,
                becomes: change.becomes,
            }));
        }
        start += line.len();
    }
    found
}

fn operators(code: &str) -> impl Iterator<Item = Change> + '_ {
    OPERATORS.iter().flat_map(move |(operator, becomes)| {
        // `template <class T>` has no spaces on both sides.
        code.match_indices(operator).map(|(at, _)| Change {
            start: at,
            end: at + operator.len(),
            becomes: (*becomes).to_owned(),
        })
    })
}

fn numbers(code: &str) -> impl Iterator<Item = Change> + '_ {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    let mut words = Vec::new();
    let mut start = None;
    for (at, c) in code.char_indices().chain([(code.len(), ' ')]) {
        match start {
            None if is_word(c) => start = Some(at),
            Some(from) if !is_word(c) => {
                words.push((from, at));
                start = None;
            }
            _ => (),
        }
    }
    words
        .into_iter()
        .filter_map(|(start, end)| Some(Change { start, end, becomes: other_number(&code[start..end])? }))
}

/// Another number of the same type; `None` for what is none.
fn other_number(word: &str) -> Option<String> {
    if !word.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    if let Some(digits) = word.strip_prefix("0x") {
        let (digits, suffix) = digits.split_at(digits.trim_end_matches(['u', 'l']).len());
        return Some(format!("{:#x}{suffix}", u64::from_str_radix(digits, 16).ok()?.checked_add(1)?));
    }
    if word.contains('.') {
        let value: f64 = word.trim_end_matches('f').parse().ok()?;
        let suffix = if word.ends_with('f') { "f" } else { "" };
        return Some(if value == 0.0 {
            format!("0.25{suffix}")
        } else {
            format!("{:?}{suffix}", value * 1.25)
        });
    }
    let (digits, suffix) = word.split_at(word.trim_end_matches(['u', 'l']).len());
    Some(format!("{}{suffix}", digits.parse::<u64>().ok()?.checked_add(1)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_operators_of_code_are_found_and_nothing_else() {
        let text = "// 1 + 2\n#define X 3\nKERNEL(256, k) {\n    u32 x2 = y[0x1fu] + 0.5f; // 7\n}\n";
        let found: Vec<(&str, String)> =
            changes(text).into_iter().map(|c| (&text[c.start..c.end], c.becomes)).collect();
        let want = [("0x1fu", "0x20u"), ("0.5f", "0.625f"), (" + ", " - ")];
        assert_eq!(found, want.map(|(old, new)| (old, new.to_owned())));
        assert!(changes("DEV template <class T> f32 a(T v2, f32x4 b);\n").is_empty());
        assert_eq!(other_number("0.0f").as_deref(), Some("0.25f"));
        assert_eq!(other_number("16"), Some("17".into()));
        assert_eq!(other_number("1e"), None);
    }

    #[test]
    fn a_round_picks_the_same_everywhere_and_none_of_none() {
        let all = changes("a + b - c * d < e\n");
        assert_eq!(all.len(), 4);
        assert!(pick("norm.hip", 0, &all).is_some());
        assert_eq!(pick("norm.hip", 0, &all), pick("norm.hip", 0, &all));
        assert!((0..20).any(|round| pick("norm.hip", round, &all) != pick("norm.hip", 0, &all)));
        assert_eq!(pick("norm.hip", 0, &[]), None);
    }
}
