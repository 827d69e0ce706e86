//! `cargo xtask verdicts`: compares llama.cpp's verdict with ours on every malformed model file of the tests, and on
//! good files of an independent writer.
//!
//! Every difference needs a reason in [`reasons`]; a difference without one is a failure.

mod reasons;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use rocmforge::model::Model;
use rocmforge::model::gguf::Gguf;
use rocmforge::model::store::Store;
use rocmforge::session::store_code;
use rocmforge_test_support::malformed::{Case, cases, numbers, templates};
use xtask::error::{Error, Result};
use xtask::{host, models};

use crate::oracle;

#[derive(clap::Args)]
pub struct Args {
    /// Write the full table here instead of below the target directory
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Only files of this class: 1 to 8 and 10, or 0 for good ones
    #[arg(long, value_name = "CLASS")]
    class: Option<u8>,
}

/// One model with both verdicts. `class` is the class of malformed files, or 0 for good ones.
struct Row {
    class: u8,
    what: String,
    /// File that llama.cpp opens: the first part if there are several.
    path: PathBuf,
    ours: Ours,
    theirs: Theirs,
}

/// Our verdict on opening a model.
enum Ours {
    Opens,
    /// Name of the error code, and the message.
    Refuses(String, String),
}

#[derive(Default, serde::Deserialize)]
struct Theirs {
    /// `answers`, `refuses`, `dies` or `hangs`.
    verdict: String,
    why: String,
}

impl Row {
    fn new(class: u8, what: &str, dir: &Path, name: &str) -> Result<Self> {
        let path = first_file(dir, name)?;
        Ok(Self { class, what: what.to_owned(), path, ours: open(dir, name), theirs: Theirs::default() })
    }

    fn agrees(&self) -> bool {
        let Theirs { verdict, why } = &self.theirs;
        // llama.cpp reads a meaningless header to its end, and then rejects its architecture.
        let read = self.class == 0 && why.contains("unknown model architecture: 'test'");
        matches!(self.ours, Ours::Opens) == (read || verdict == "answers")
    }

    fn line(&self) -> String {
        let Self { class, what, ours, theirs, .. } = self;
        let ours = match ours {
            Ours::Opens => "opens".to_owned(),
            Ours::Refuses(code, why) => format!("{code}: {}", cell(why)),
        };
        format!("| {class} | {} | {ours} | {} {} |", cell(what), theirs.verdict, cell(&theirs.why))
    }
}

/// Text for a table cell: one short line without bars.
fn cell(text: &str) -> String {
    let shown: String =
        text.chars().map(|c| if c.is_control() || c == '|' { ' ' } else { c }).take(160).collect();
    shown.trim().to_owned()
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let work = host::target_dir().join("verdicts");
    if work.exists() {
        fs::remove_dir_all(&work).map_err(Error::at(&work))?;
    }
    fs::create_dir_all(&work).map_err(Error::at(&work))?;
    let mut rows = write(&work, args.class)?;
    ask(&mut rows)?;
    let out = args.out.clone().unwrap_or_else(|| work.join("table.md"));
    let head = "| class | what | here | llama.cpp |\n|---|---|---|---|\n";
    let table: String = rows.iter().map(|row| row.line() + "\n").collect();
    fs::write(&out, format!("{head}{table}")).map_err(Error::at(&out))?;
    println!("{} files; full table: {}", rows.len(), out.display());
    summarise(&rows)
}

/// Writes all files below `work`, each model into its own directory, and records our verdicts.
fn write(work: &Path, class: Option<u8>) -> Result<Vec<Row>> {
    let wanted = |of: u8| class.is_none_or(|class| class == of);
    let mut all: Vec<Case> = cases();
    all.extend(templates().into_iter().map(|(what, forge)| Case::whole(6, what, &forge)));
    all.extend(numbers().into_iter().map(|numbers| Case::whole(10, &numbers.what, &numbers.forge)));
    let mut rows = Vec::new();
    for (number, case) in all.iter().enumerate().filter(|(_, case)| wanted(case.class)) {
        let dir = work.join(number.to_string());
        fs::create_dir_all(&dir).map_err(Error::at(&dir))?;
        case.write(&dir, "model");
        rows.push(Row::new(case.class, &case.what, &dir, "model")?);
    }
    if wanted(0) {
        rows.extend(good()?);
    }
    Ok(rows)
}

/// Files of an independent writer: whole models, meaningless headers, and files that we refuse.
fn good() -> Result<Vec<Row>> {
    let written = models::ensure_written()?;
    let dir = written.join("models");
    let mut rows: Vec<Row> =
        names(&dir)?.iter().map(|name| Row::new(0, name, &dir, name)).collect::<Result<_>>()?;
    for below in ["headers", "refused"] {
        let dir = written.join(below);
        for name in names(&dir)? {
            let path = first_file(&dir, &name)?;
            let ours = match File::open(&path).map_err(Error::at(&path)).map(Gguf::open)? {
                Ok(_) => Ours::Opens,
                Err(error) => Ours::Refuses("Gguf".into(), error.to_string()),
            };
            rows.push(Row {
                class: 0,
                what: format!("{below}/{name}"),
                path,
                ours,
                theirs: Theirs::default(),
            });
        }
    }
    Ok(rows)
}

/// Names of the models in a directory; parts count as one model.
fn names(dir: &Path) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(dir).map_err(Error::at(dir))? {
        let file = entry.map_err(Error::at(dir))?.file_name().to_string_lossy().into_owned();
        let Some(stem) = file.strip_suffix(".gguf") else { continue };
        names.insert(stem.split("-0000").next().unwrap_or(stem).to_owned());
    }
    Ok(names)
}

/// The file of a model: `NAME.gguf`, its first part `NAME-00001-of-...`, or the first existing part.
fn first_file(dir: &Path, name: &str) -> Result<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(Error::at(dir))? {
        let path = entry.map_err(Error::at(dir))?.path();
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let rest = file.strip_prefix(name).unwrap_or_default();
        if rest == ".gguf" || rest.starts_with("-0") && rest.ends_with(".gguf") {
            files.push(path);
        }
    }
    files.sort();
    files
        .into_iter()
        .next()
        .ok_or_else(|| Error::Unexpected { what: "a model without a file", text: name.into() })
}

/// Our verdict: opens a model like the daemon.
fn open(dir: &Path, name: &str) -> Ours {
    let open = |id, name: &str, files, _charge| Ok(Model::open(id, name, files)?);
    let store = Store::new(vec![dir.to_path_buf()], Arc::default(), Box::new(open), Box::new(|_| {}));
    store.rescan();
    match Arc::clone(&store).acquire(0, name) {
        Ok(_) => Ours::Opens,
        Err(error) => Ours::Refuses(format!("{:?}", store_code(&error)), error.to_string()),
    }
}

/// Asks llama.cpp about all files.
fn ask(rows: &mut [Row]) -> Result<()> {
    let python = oracle::environment()?;
    let script = host::root().join("tests/reference/verdicts.py");
    for rows in rows.chunks_mut(100) {
        let mut command = Command::new(&python);
        command.arg(&script).args(rows.iter().map(|row| &row.path));
        let said = host::read(&mut command)?;
        let unexpected = || Error::Unexpected { what: "verdicts.py", text: said.clone() };
        let verdicts: Vec<Theirs> = said
            .lines()
            .map(serde_json::from_str)
            .collect::<std::result::Result<_, _>>()
            .map_err(|_| unexpected())?;
        if verdicts.len() != rows.len() {
            return Err(unexpected());
        }
        rows.iter_mut().zip(verdicts).for_each(|(row, verdict)| row.theirs = verdict);
    }
    Ok(())
}

/// Prints the counts of each pair of verdicts, and all differences by reason.
fn summarise(rows: &[Row]) -> Result<()> {
    let mut counts = BTreeMap::<(u8, &str, &str), usize>::new();
    for row in rows {
        let ours = if matches!(row.ours, Ours::Opens) { "opens" } else { "refused" };
        *counts.entry((row.class, ours, &row.theirs.verdict)).or_default() += 1;
    }
    println!("{:>5}  {:8} {:9} {:>5}", "class", "here", "llama.cpp", "files");
    counts
        .iter()
        .for_each(|((class, ours, theirs), count)| println!("{class:>5}  {ours:8} {theirs:9} {count:>5}"));
    let mut unexplained = Vec::new();
    let mut explained = BTreeMap::<&str, Vec<&Row>>::new();
    for row in rows.iter().filter(|row| !row.agrees()) {
        match reasons::of(row.class, &row.what) {
            Some(reason) => explained.entry(reason).or_default().push(row),
            None => unexplained.push(row),
        }
    }
    for (reason, rows) in &explained {
        println!("\n{reason}: {}", rows.len());
        rows.iter().for_each(|row| println!("  {}", row.line()));
    }
    if unexplained.is_empty() {
        return Ok(());
    }
    println!("\ndifferences without a reason:");
    unexplained.iter().for_each(|row| println!("  {}", row.line()));
    Err(Error::Unexpected {
        what: "llama.cpp's verdicts",
        text: format!("{} of them differ from ours without a reason", unexplained.len()),
    })
}
