//! `cargo xtask coverage`: a table of how many of the project's lines its tests run, by part.
//!
//! Uses the compiler's own instrumentation through cargo-llvm-cov. Not part of the check, because it builds
//! everything again. Counts are in files that all processes of a program map, so a daemon that a test kills is
//! counted too. The process that renders templates is not counted: it has no environment and may open no file.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::host;
use crate::lookalike::{self, Variant};

/// The version that the command was written for.
const TOOL: &str = "cargo-llvm-cov@0.8.7";

/// Files of counts: `%c` counts in the mapped file itself, `%4m` is one of four files per program.
const COUNTS: &str = "rocmforge-%4m%c.profraw";

/// `%c` needs this on Linux: programs find the counters through an address that may change at start.
const RELOCATED: &str = "-C llvm-args=-runtime-counter-relocation";

#[derive(clap::Args)]
pub struct Args {
    /// More arguments of `cargo test`, to run only some tests: `-- --test adversarial`
    #[arg(last = true)]
    rest: Vec<String>,
    /// List the lines that no test runs, in files whose path contains this text
    #[arg(long, value_name = "TEXT")]
    missing: Option<String>,
}

/// A part of the project, its folders, and the percentage of its lines that tests should run.
struct Part {
    name: &'static str,
    folders: &'static [&'static str],
    least: f64,
}

const PARTS: [Part; 4] = [
    Part { name: "wire", folders: &["client/src/wire/"], least: 95.0 },
    Part { name: "parser", folders: &["src/model/gguf/", "src/model/files.rs"], least: 95.0 },
    Part {
        name: "lifecycle",
        folders: &["src/daemon/", "src/socket/", "src/session/", "src/model/store/"],
        least: 95.0,
    },
    Part { name: "all", folders: &["src/", "client/src/"], least: 80.0 },
];

/// The fields of `cargo llvm-cov --json` that are used.
#[derive(Deserialize)]
struct Report {
    data: Vec<Data>,
}

#[derive(Deserialize)]
struct Data {
    files: Vec<FileCoverage>,
}

#[derive(Deserialize)]
struct FileCoverage {
    filename: String,
    segments: Vec<Segment>,
}

/// From a place in a file on: line, column, number of runs, whether they were counted. The last two say whether a
/// region begins here, and whether it is a gap between regions.
type Segment = (usize, u64, u64, bool, bool, bool);

/// Executable lines of one file: their numbers, and whether each ran.
type Lines = Vec<(usize, bool)>;

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    if !host::works(host::cargo().args(["llvm-cov", "--version"])) {
        host::install_crate(TOOL)?;
    }
    // Part of the toolchain, like rustfmt; the command succeeds silently if it is already installed.
    if !host::works(Command::new("rustup").args(["component", "add", "llvm-tools"])) {
        return Err(Error::ToolMissing {
            program: "llvm-tools".into(),
            package: "rustup component llvm-tools",
        });
    }
    let out = host::target_dir().join("coverage.json");
    let mut command = host::cargo();
    command.args(["llvm-cov", "test", "--profile", "coverage", "--workspace"]);
    command.args(["--ignore-run-fail", "--json", "--output-path"]).arg(&out).args(&args.rest);
    command.env("RUSTFLAGS", RELOCATED).env("LLVM_PROFILE_FILE_NAME", COUNTS);
    // Built here, because tests would build it with instrumentation.
    match lookalike::build(Variant::Wave32) {
        Ok(library) => drop(command.env("ROCMFORGE_LOOKALIKE", library)),
        Err(error) => println!("the GPU tests will not run: {error}"),
    }
    host::run(&mut command)?;
    let text = std::fs::read(&out).map_err(Error::at(&out))?;
    let report: Report = serde_json::from_slice(&text)
        .map_err(|error| Error::Unexpected { what: "cargo llvm-cov", text: error.to_string() })?;
    let mut files = BTreeMap::new();
    for file in report.data.into_iter().flat_map(|data| data.files) {
        let Some(path) = below_root(&file.filename) else { continue };
        let source = std::fs::read_to_string(&file.filename).map_err(Error::at(Path::new(&file.filename)))?;
        files.insert(path, lines(&file.segments, tests_begin(&source)));
    }
    let low = print(&files);
    if let Some(part) = &args.missing {
        files
            .iter()
            .filter(|(path, _)| path.contains(part.as_str()))
            .for_each(|(path, lines)| missing(path, lines));
    }
    // A run of some tests is no verdict.
    let judged = args.rest.is_empty() && !low.is_empty();
    if judged { Err(Error::Uncovered { parts: low.join(", ") }) } else { Ok(()) }
}

fn below_root(path: &str) -> Option<String> {
    Some(Path::new(path).strip_prefix(host::root()).ok()?.to_str()?.to_owned())
}

/// The line where a file's own tests begin. They are at its end and do not count as lines of the project.
fn tests_begin(source: &str) -> usize {
    let lines: Vec<&str> = source.lines().collect();
    let begins = |pair: &[&str]| {
        pair[0].starts_with("#[cfg(")
            && pair[0].contains("test")
            && pair[1].starts_with("mod ")
            && pair[1].ends_with('{')
    };
    lines.windows(2).position(begins).map_or(usize::MAX, |index| index + 1)
}

/// Counts like llvm-cov: a line ran as often as the region that reaches into it, or a region that begins on it.
fn lines(segments: &[Segment], end: usize) -> Lines {
    let last = segments.last().map_or(0, |segment| segment.0).min(end.saturating_sub(1));
    let mut found = Lines::new();
    let (mut next, mut before) = (0, None::<Segment>);
    for line in 1..=last {
        let here: Vec<Segment> = segments[next..].iter().copied().take_while(|s| s.0 == line).collect();
        next += here.len();
        let begins = || here.iter().filter(|(_, _, _, counted, entry, gap)| *counted && *entry && !gap);
        let skipped = here.first().is_some_and(|(_, _, _, counted, entry, _)| !counted && *entry);
        let around = before.filter(|segment| segment.3);
        if !skipped && (around.is_some() || begins().next().is_some()) {
            let most = begins().map(|segment| segment.2).chain(around.map(|segment| segment.2)).max();
            found.push((line, most > Some(0)));
        }
        before = here.last().copied().or(before);
    }
    found
}

/// Prints the table; returns the parts of which tests run too few lines.
fn print(files: &BTreeMap<String, Lines>) -> Vec<&'static str> {
    let mut low = Vec::new();
    for part in &PARTS {
        let of_part =
            files.iter().filter(|(path, _)| part.folders.iter().any(|folder| path.starts_with(folder)));
        let (mut ran, mut count) = (0, 0);
        for (path, lines) in of_part {
            let here = lines.iter().filter(|(_, ran)| *ran).count();
            (ran, count) = (ran + here, count + lines.len());
            if part.name != "all" {
                println!(
                    "  {path:48} {here:6} of {:6} lines, {:5.1} %",
                    lines.len(),
                    share(here, lines.len())
                );
            }
        }
        let all = share(ran, count);
        let enough = all >= part.least;
        if !enough {
            low.push(part.name);
        }
        let verdict = if enough { "enough" } else { "TOO LOW" };
        println!(
            "{:50} {ran:6} of {count:6} lines, {all:5.1} %, goal {:.0} %: {verdict}",
            part.name, part.least
        );
    }
    low
}

fn share(ran: usize, count: usize) -> f64 {
    100.0 * ran as f64 / count.max(1) as f64
}

/// Prints the runs of lines that no test runs.
fn missing(path: &str, lines: &Lines) {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (line, _) in lines.iter().filter(|(_, ran)| !ran) {
        match runs.last_mut() {
            Some((_, end)) if *end + 1 == *line => *end = *line,
            _ => runs.push((*line, *line)),
        }
    }
    let shown =
        runs.iter().map(|(from, to)| if from == to { from.to_string() } else { format!("{from}-{to}") });
    let shown: Vec<String> = shown.collect();
    if !shown.is_empty() {
        println!("{path}: {}", shown.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A function whose second line ends with `if x {`, where x is never true, and a function that is never called.
    #[test]
    fn a_line_runs_as_the_region_that_reaches_it() {
        let segments = [
            (1, 1, 3, true, true, false),
            (2, 8, 0, true, true, false),
            (4, 6, 3, true, false, false),
            (6, 2, 0, false, false, false),
            (8, 1, 0, true, true, false),
            (9, 2, 0, false, false, false),
        ];
        // The line of a closing brace belongs to the region that ends on it.
        let wanted =
            [(1, true), (2, true), (3, false), (4, false), (5, true), (6, true), (8, false), (9, false)];
        assert_eq!(lines(&segments, usize::MAX), wanted);
        assert_eq!(lines(&segments, 3), wanted[..2]);
    }

    #[test]
    fn a_files_own_tests_are_not_counted() {
        assert_eq!(tests_begin("fn f() {}\n#[cfg(test)]\nmod tests {\n}\n"), 2);
        assert_eq!(tests_begin("fn f() {}\n#[cfg(test)]\nmod tests;\n"), usize::MAX);
    }
}
