//! `cargo xtask kernels --mutate`: changes one number or operator of a kernel file and runs the kernel tests on
//! look-alikes built from it until one fails. Lists the changes that no test noticed: a line that no test covers, or
//! one that does not matter.

mod bench;
mod changes;
mod suite;

use std::fs;
use std::path::Path;
use std::time::Instant;

use xtask::error::{Error, Result};
use xtask::host;
use xtask::lookalike::{Variant, sources};

use bench::{Bench, Fate};
use changes::Change;
use suite::Suite;

/// Files that the CPU never compiles.
const OTHER_MACHINES: [&str; 2] = ["prelude/amd", "prelude/nvidia"];

/// The first two compile every line for the CPU: both wave sizes, with and without a matrix unit. The last detects
/// accesses outside an array. Each variant tries only changes that the previous ones did not notice.
const VARIANTS: [Variant; 3] = [Variant::Wave32, Variant::Wave64NoMatrix, Variant::Wave32Sanitized];

/// Tests by the folders and files that they cover: these run first, then all others.
const FIRST: [(&str, &[&str]); 24] = [
    ("gemv", &["matmul::"]),
    ("gemm", &["matmul::gemm"]),
    ("dequant", &["matmul::layout"]),
    ("repack", &["matmul::layout"]),
    ("quant/", &["matmul::", "embed::"]),
    ("attn", &["attention::", "making::"]),
    ("attention/", &["attention::", "making::"]),
    ("common/pages", &["attention::", "rope::"]),
    ("common/heads", &["rope::", "making::"]),
    ("sampl", &["sample::"]),
    ("embed", &["embed::"]),
    ("rope", &["rope::"]),
    ("router", &["router::"]),
    ("route", &["experts::"]),
    ("routing", &["experts::", "router::"]),
    ("combine", &["experts::"]),
    ("gated", &["gated::"]),
    ("activations", &["gated::", "recurrent::convolve::"]),
    ("recurrent/", &["recurrent::"]),
    ("convolve", &["recurrent::convolve::"]),
    ("selective_scan", &["recurrent::scan::"]),
    ("delta_rule", &["recurrent::delta::"]),
    ("_rows", &["rows::", "streams::"]),
    ("_streams", &["streams::"]),
];

/// Results of one file's changes.
#[derive(Default)]
struct Tally {
    places: usize,
    refused: usize,
    same: usize,
    killed: usize,
    survived: usize,
}

/// Tries changes in each file whose path contains one of `names`, or in every file if `names` is empty. It ends when
/// `rounds` changes per file have a verdict.
///
/// # Errors
/// [`Error::Survived`], errors of building.
pub fn run(names: &[String], rounds: usize) -> Result<()> {
    let root = host::target_dir().join("mutants");
    copy(&root.join("kernels"))?;
    let mut trial =
        Trial { suite: Suite::build(&root.join("tests"))?, benches: Vec::new(), survivors: Vec::new() };
    trial.benches.push(Bench::new(&root, VARIANTS[0], &trial.suite)?);
    let mut tallies = Vec::new();
    for file in sources::inputs(&sources::dir())? {
        let name = file.strip_prefix(sources::dir()).unwrap_or(&file).to_string_lossy().into_owned();
        let is_wanted = names.is_empty() || names.iter().any(|part| name.contains(part.as_str()));
        if is_wanted && !OTHER_MACHINES.iter().any(|others| name.starts_with(others)) {
            let tally = trial.file(&root, &file, &name, rounds)?;
            tallies.push((name, tally));
        }
    }
    table(&tallies);
    if trial.survivors.is_empty() {
        Ok(())
    } else {
        Err(Error::Survived { changes: trial.survivors.join("\n  ") })
    }
}

/// The tests and look-alikes, and the changes that no test noticed.
struct Trial {
    suite: Suite,
    benches: Vec<Bench>,
    survivors: Vec<String>,
}

impl Trial {
    fn file(&mut self, root: &Path, file: &Path, name: &str, rounds: usize) -> Result<Tally> {
        let text = fs::read_to_string(file).map_err(Error::at(file))?;
        let place = root.join("kernels").join(name);
        let changes = changes::shuffled(name, &text);
        let mut tally = Tally { places: changes.len(), ..Tally::default() };
        for change in changes {
            if tally.killed + tally.survived >= rounds {
                break;
            }
            let started = Instant::now();
            let fate = self.fate(root, &place, &text, &change, first(name));
            fs::write(&place, &text).map_err(Error::at(&place))?;
            let shown = change.shown(name, &text);
            let seconds = started.elapsed().as_secs();
            match fate? {
                Fate::Refused => tally.refused += 1,
                Fate::Same => tally.same += 1,
                Fate::Killed(by) => {
                    tally.killed += 1;
                    println!("{shown}: killed by {by} ({seconds} s)");
                }
                Fate::Survived => {
                    tally.survived += 1;
                    println!("{shown}: SURVIVED ({seconds} s)");
                    self.survivors.push(shown);
                }
            }
        }
        Ok(tally)
    }

    /// Tries the change on each variant until one notices it. It survived if a variant compiles it to other code and
    /// none notices.
    fn fate(
        &mut self,
        root: &Path,
        place: &Path,
        text: &str,
        change: &Change,
        first: &[&str],
    ) -> Result<Fate> {
        let mut last = Fate::Same;
        for (i, variant) in VARIANTS.into_iter().enumerate() {
            if i == self.benches.len() {
                fs::write(place, text).map_err(Error::at(place))?;
                self.benches.push(Bench::new(root, variant, &self.suite)?);
            }
            fs::write(place, change.applied(text)).map_err(Error::at(place))?;
            match self.benches[i].try_change(first, &self.suite)? {
                Fate::Same => (),
                Fate::Survived => last = Fate::Survived,
                decided => return Ok(decided),
            }
        }
        Ok(last)
    }
}

fn first(name: &str) -> &'static [&'static str] {
    FIRST.iter().find(|(part, _)| name.contains(part)).map_or(&[], |(_, tests)| tests)
}

fn table(tallies: &[(String, Tally)]) {
    println!(
        "\n{:32} {:>7} {:>7} {:>9} {:>7} {:>9}",
        "file", "changes", "refused", "same code", "killed", "survived"
    );
    let mut sum = Tally::default();
    let row = |name: &str, t: &Tally| {
        println!("{name:32} {:7} {:7} {:9} {:7} {:9}", t.places, t.refused, t.same, t.killed, t.survived);
    };
    for (name, tally) in tallies {
        row(name, tally);
        sum.places += tally.places;
        sum.refused += tally.refused;
        sum.same += tally.same;
        sum.killed += tally.killed;
        sum.survived += tally.survived;
    }
    row("all", &sum);
}

/// Copies the unchanged kernels, to be changed one file at a time.
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
