//! `cargo xtask coverage`: which lines of the project its tests run, by part, as a table.
//!
//! The compiler's own instrumentation, through cargo-llvm-cov. Not a part of the check: everything is built once more.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::host;

/// The version that the command was written against.
const TOOL: &str = "cargo-llvm-cov@0.8.7";

#[derive(clap::Args)]
pub struct Args {
    /// Further arguments of `cargo test`, to run a part: `-- --test adversarial`
    #[arg(last = true)]
    rest: Vec<String>,
    /// Name the lines that no test runs, of files whose path holds this
    #[arg(long, value_name = "TEXT")]
    missing: Option<String>,
}

/// A part of the project, where it lies, and the share of its lines that tests should run.
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
        folders: &[
            "src/daemon/",
            "src/socket/",
            "src/session/mod.rs",
            "src/session/outbox.rs",
            "src/model/store/",
        ],
        least: 95.0,
    },
    Part { name: "all", folders: &["src/", "client/src/"], least: 80.0 },
];

/// What `cargo llvm-cov --json` says, as far as it is read.
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
    summary: Summary,
    /// Line, column, count, whether it has one, and two of no interest here.
    segments: Vec<(u64, u64, u64, bool, bool, bool)>,
}

#[derive(Deserialize)]
struct Summary {
    lines: Lines,
}

#[derive(Clone, Copy, Default, Deserialize)]
struct Lines {
    count: u64,
    covered: u64,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    if !host::works(host::cargo().args(["llvm-cov", "--version"])) {
        host::run(host::cargo().args(["install", "--locked", "--quiet", TOOL]))?;
    }
    // Part of the toolchain, like rustfmt; there already where this says nothing.
    if !host::works(Command::new("rustup").args(["component", "add", "llvm-tools"])) {
        return Err(Error::ToolMissing {
            program: "llvm-tools".into(),
            package: "rustup component llvm-tools",
        });
    }
    let out = host::target_dir().join("coverage.json");
    let mut command = host::cargo();
    command.args([
        "llvm-cov",
        "test",
        "--workspace",
        "--no-fail-fast",
        "--ignore-run-fail",
        "--json",
        "--output-path",
    ]);
    host::run(command.arg(&out).args(&args.rest))?;
    let text = std::fs::read(&out).map_err(Error::at(&out))?;
    let report: Report = serde_json::from_slice(&text)
        .map_err(|error| Error::Unexpected { what: "cargo llvm-cov", text: error.to_string() })?;
    let files: BTreeMap<String, FileCoverage> = report
        .data
        .into_iter()
        .flat_map(|data| data.files)
        .filter_map(|file| Some((below_root(&file.filename)?, file)))
        .collect();
    print(&files);
    if let Some(part) = &args.missing {
        files
            .iter()
            .filter(|(path, _)| path.contains(part.as_str()))
            .for_each(|(path, file)| missing(path, file));
    }
    Ok(())
}

fn below_root(path: &str) -> Option<String> {
    Some(Path::new(path).strip_prefix(host::root()).ok()?.to_str()?.to_owned())
}

fn print(files: &BTreeMap<String, FileCoverage>) {
    for part in &PARTS {
        let of_part =
            files.iter().filter(|(path, _)| part.folders.iter().any(|folder| path.starts_with(folder)));
        let mut sum = Lines::default();
        for (path, file) in of_part {
            let Lines { count, covered } = file.summary.lines;
            (sum.count, sum.covered) = (sum.count + count, sum.covered + covered);
            if part.name != "all" {
                println!("  {path:48} {covered:6} of {count:6} lines, {:5.1} %", share(file.summary.lines));
            }
        }
        let Lines { count, covered } = sum;
        let all = share(sum);
        let verdict = if all >= part.least { "enough" } else { "LESS THAN ASKED" };
        println!(
            "{:50} {covered:6} of {count:6} lines, {all:5.1} %, asked {:.0} %: {verdict}",
            part.name, part.least
        );
    }
}

fn share(lines: Lines) -> f64 {
    100.0 * lines.covered as f64 / lines.count.max(1) as f64
}

fn missing(path: &str, file: &FileCoverage) {
    let lines: Vec<String> =
        file.segments.iter().filter(|s| s.2 == 0 && s.3).map(|segment| segment.0.to_string()).collect();
    if !lines.is_empty() {
        println!("{path}: not run from lines {}", lines.join(", "));
    }
}
