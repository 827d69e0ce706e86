//! Files of the configuration: one, and the drop-ins beside it.
//!
//! A drop-in has the form of the whole file. Files are merged key by key, in order. The last file that sets a key
//! decides, and tables keep the keys that a later file does not name.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fmt, fs};

use serde::Deserialize;
use toml::{Table, Value};

use super::{Config, ConfigError};

/// Longest file; each is read whole.
pub(super) const FILE_BYTES_MAX: u64 = 1 << 20;

/// Directory of drop-ins, beside the file.
const DROP_INS: &str = "conf.d";

/// Most drop-ins: with the longest files, they take this many MiB of memory for a moment.
pub(super) const DROP_INS_MAX: usize = 256;

/// The file that set each value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origins {
    /// In the order in which they were read.
    files: Vec<PathBuf>,
    /// The place in `files`, by the names of the tables and the key.
    keys: BTreeMap<Vec<String>, usize>,
}

impl Origins {
    /// Adds the name of the file that set the faulty value, if a file did.
    pub fn name(&self, error: ConfigError) -> ConfigError {
        match error.key().and_then(|key| self.of(&key)) {
            Some(path) => ConfigError::SetIn { path: path.into(), source: Box::new(error) },
            None => error,
        }
    }

    /// A value of another source takes the place of a file's.
    pub fn forget(&mut self, key: &str) {
        self.keys.remove(&[key.to_owned()][..]);
    }

    /// The file that set a key. Of a table's keys, the file that was read last counts.
    fn of(&self, key: &[&str]) -> Option<&Path> {
        let below = |found: &&Vec<String>| key.iter().zip(found.iter()).all(|(a, b)| a == b);
        let exact_or_below = |found: &&Vec<String>| found.len() >= key.len() && below(found);
        let last = self.keys.iter().filter(|(found, _)| exact_or_below(found)).map(|(_, at)| *at).max()?;
        self.files.get(last).map(PathBuf::as_path)
    }

    /// Merges `from`, which the last file has below the tables `above`.
    fn merge(&mut self, into: &mut Table, from: Table, above: &mut Vec<String>) {
        for (key, value) in from {
            above.push(key);
            let key = above.last().map_or("", String::as_str);
            match (into.get_mut(key), value) {
                (Some(Value::Table(into)), Value::Table(from)) => self.merge(into, from, above),
                (_, Value::Table(from)) => {
                    let mut table = Table::new();
                    let name = key.to_owned();
                    self.merge(&mut table, from, above);
                    into.insert(name, Value::Table(table));
                }
                (_, value) => {
                    into.insert(key.to_owned(), value);
                    self.keys.insert(above.clone(), self.files.len().saturating_sub(1));
                }
            }
            above.pop();
        }
    }
}

/// The files in the order in which they were read.
impl fmt::Display for Origins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.files.is_empty() {
            return f.write_str("no file");
        }
        for (at, path) in self.files.iter().enumerate() {
            write!(f, "{}{}", if at == 0 { "" } else { ", " }, path.display())?;
        }
        Ok(())
    }
}

/// Reads a file and the drop-ins beside it, and checks their types. An empty file, which an interrupted write leaves, is
/// refused unless it `may_be_empty`.
///
/// # Errors
/// [`ConfigError`].
pub fn read(path: &Path, may_be_empty: bool) -> Result<(Config, Origins), ConfigError> {
    let mut origins = Origins::default();
    let mut merged = Table::new();
    for path in std::iter::once(path.to_owned()).chain(drop_ins(path)?) {
        let text = text(&path, may_be_empty)?;
        let invalid = |source| ConfigError::Parse { path: path.clone(), source };
        // Each by itself first: the fault's line is one of this file.
        Config::parse(&text).map_err(invalid)?;
        let table = toml::from_str(&text).map_err(|source| invalid(Box::new(source)))?;
        origins.files.push(path.clone());
        origins.merge(&mut merged, table, &mut Vec::new());
    }
    let invalid = |source| ConfigError::Parse { path: path.into(), source: Box::new(source) };
    Ok((Config::deserialize(merged).map_err(invalid)?, origins))
}

fn text(path: &Path, may_be_empty: bool) -> Result<String, ConfigError> {
    let read = |source| ConfigError::Read { path: path.into(), source };
    let meta = fs::metadata(path).map_err(read)?;
    if !meta.is_file() || meta.len() > FILE_BYTES_MAX {
        return Err(ConfigError::NotAFile { path: path.into() });
    }
    let text = fs::read_to_string(path).map_err(read)?;
    if text.trim().is_empty() && !may_be_empty {
        return Err(ConfigError::Empty { path: path.into() });
    }
    Ok(text)
}

/// The drop-ins beside a file, in the order of their names. Hidden files are those of editors.
fn drop_ins(beside: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let dir = beside.with_file_name(DROP_INS);
    let read = |source| ConfigError::Read { path: dir.clone(), source };
    let owner = match fs::metadata(&dir) {
        // A file of this name is no directory of ours.
        Ok(meta) if !meta.is_dir() => return Ok(Vec::new()),
        Ok(meta) => meta.uid(),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(read(error)),
    };
    // In a directory such as /tmp, anybody could make this one.
    let trusted = [0, rustix::process::geteuid().as_raw(), fs::metadata(beside).map_err(read)?.uid()];
    if !trusted.contains(&owner) {
        return Err(ConfigError::Foreign { path: dir, owner, beside: beside.into() });
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(&dir).map_err(read)? {
        let name = entry.map_err(read)?.file_name();
        let bytes = name.as_encoded_bytes();
        if bytes.ends_with(b".toml") && !bytes.starts_with(b".") {
            found.push(dir.join(name));
        }
    }
    if found.len() > DROP_INS_MAX {
        return Err(ConfigError::TooMany { path: dir, found: found.len() });
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A configuration and its drop-ins, by name.
    fn written(text: &str, drop_ins: &[(&str, &str)]) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        fs::write(&path, text).unwrap();
        fs::create_dir(dir.path().join(DROP_INS)).unwrap();
        for (name, text) in drop_ins {
            fs::write(dir.path().join(DROP_INS).join(name), text).unwrap();
        }
        (dir, path)
    }

    #[test]
    fn later_files_win_key_by_key() {
        let text = "models = ['/a', '/b']\n[limits]\nqueued = 5\nrunning = 6\n[limits.users]\nal = { share = 7 }\n[kv]\nkeep_mib = 1";
        let (_dir, path) = written(
            text,
            &[
                (
                    "20-b.toml",
                    "models = ['/c']\n[limits]\nqueued = 9\n[weights.models]\nm = { pinned = true }",
                ),
                (
                    "10-a.toml",
                    "[limits]\nqueued = 8\nrunning = 7\nusers = { al = { requests = 2 }, bo = { share = 3 } }",
                ),
                ("9.toml", "[weights.models.m]\npriority = 4\n[log]\nlevel = 'warn'"),
                (".hidden.toml", "nonsense = 1"),
                ("20-b.toml.dpkg-old", "nonsense = 1"),
                ("README", "nonsense = 1"),
            ],
        );
        let (config, origins) = read(&path, false).unwrap();
        // The same settings in one file.
        let joined = "models = ['/c']\n[limits]\nqueued = 9\nrunning = 7\n[limits.users]\nal = { share = 7, requests = 2 }\nbo = { share = 3 }
            [kv]\nkeep_mib = 1\n[log]\nlevel = 'warn'\n[weights.models]\nm = { pinned = true, priority = 4 }";
        assert_eq!(config, Config::parse(joined).unwrap());
        let names: Vec<_> =
            origins.files.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["config.toml", "10-a.toml", "20-b.toml", "9.toml"]);
        assert!(origins.to_string().contains("conf.d/20-b.toml, "), "{origins}");
    }

    #[test]
    fn faults_are_named_by_file_and_key() {
        let says = |text: &str, drop_ins: &[(&str, &str)]| {
            let (_dir, path) = written(text, drop_ins);
            let (config, origins) = match read(&path, false) {
                Ok(read) => read,
                Err(error) => return error.to_string(),
            };
            origins.name(config.check().unwrap_err()).to_string()
        };
        let low = ("a.toml", "[limits]\nconnections = 0");
        let cases = [
            (says("", &[]), "config.toml is empty"),
            (says("#", &[("a.toml", " ")]), "conf.d/a.toml is empty"),
            (says("#", &[("a.toml", "[log")]), "conf.d/a.toml is not valid"),
            (says("#", &[("a.toml", "#"), ("b.toml", "[cpu]\nthreds = 3")]), "threds"),
            (
                says("#", &[("b.toml", "[cpu]\nthreads = '3'")]),
                "conf.d/b.toml is not valid: TOML parse error at line 2",
            ),
            (says("#", &[low]), "conf.d/a.toml: limits.connections = 0 is not in 1..="),
            (
                says("[limits]\nconnections = 0", &[("a.toml", "[limits]\nqueued = 2")]),
                "config.toml: limits.connections = 0",
            ),
            (
                says("#", &[low, ("b.toml", "[limits]\nconnections = 70000")]),
                "b.toml: limits.connections = 70000",
            ),
            (
                says(
                    "#",
                    &[
                        ("a.toml", "[limits.users]\nal = { share = 0 }"),
                        ("b.toml", "[limits.users]\nal = { requests = 1 }"),
                    ],
                ),
                "a.toml: limits.users.\"al\": share = 0",
            ),
            (says("#", &[("a.toml", "models = ['x']")]), "a.toml: models must be an absolute path, not x"),
        ];
        for (found, says) in cases {
            assert!(found.contains(says), "{found:?} does not say {says:?}");
        }
        // A fault that an option of the command line covers is not the file's.
        let (_dir, path) = written("models = ['x']", &[]);
        let (_, mut origins) = read(&path, false).unwrap();
        let fault = || ConfigError::Relative { key: "models", path: "y".into() };
        assert!(origins.name(fault()).to_string().contains("config.toml"));
        origins.forget("models");
        assert_eq!(origins.name(fault()).to_string(), fault().to_string());
    }

    #[test]
    fn a_directory_that_is_no_directory_of_drop_ins_is_not_read() {
        let (dir, path) = written("#", &[]);
        let drop_ins = dir.path().join(DROP_INS);
        assert_eq!(read(&path, false).unwrap().0, Config::default());
        for at in 0..=DROP_INS_MAX {
            fs::write(drop_ins.join(format!("{at}.toml")), "#").unwrap();
        }
        let error = read(&path, false).unwrap_err().to_string();
        assert!(error.contains("conf.d has 257 files") && error.contains("at most 256"), "{error}");
        fs::remove_dir_all(&drop_ins).unwrap();
        assert_eq!(read(&path, false).unwrap().0, Config::default());
        fs::write(&drop_ins, "nonsense").unwrap();
        assert_eq!(read(&path, false).unwrap().0, Config::default());
        fs::remove_file(&drop_ins).unwrap();
        fs::create_dir_all(drop_ins.join("a.toml")).unwrap();
        let error = read(&path, false).unwrap_err().to_string();
        assert!(error.contains("a.toml is not a regular file"), "{error}");
    }

    /// Only root can give files away.
    #[test]
    fn drop_ins_of_another_user_are_refused() {
        let (dir, path) = written("#", &[("a.toml", "[limits]\nqueued = 2")]);
        let drop_ins = dir.path().join(DROP_INS);
        let give = |path: &Path| std::os::unix::fs::chown(path, Some(12_345), None);
        if let Err(error) = give(&drop_ins) {
            println!("rocmforge-test-skipped: drop-ins of another user, which only root can make: {error}");
            return;
        }
        let error = read(&path, false).unwrap_err().to_string();
        assert!(error.contains("conf.d belongs to the user 12345"), "{error}");
        give(&path).unwrap();
        assert_eq!(read(&path, false).unwrap().0.limits.queued, 2);
    }
}
