//! The files of the model directories.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags};

use super::{NAME_BYTES_MAX, NAMES_MAX};

/// A `.gguf` entry of a model directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub path: PathBuf,
    pub bytes: u64,
    /// Why it cannot be a model, where that shows without opening it.
    pub unusable: Option<String>,
}

/// All `.gguf` entries of `directories` by name. Of equal names the first directory's is served.
///
/// Nothing is opened. Directories that cannot be read are logged and passed over: the others' models are still served.
pub(super) fn scan(directories: &[PathBuf]) -> BTreeMap<String, Entry> {
    let mut entries = BTreeMap::new();
    for directory in directories {
        let listing = match std::fs::read_dir(directory) {
            Ok(listing) => listing,
            Err(error) => {
                tracing::warn!(directory = %directory.display(), %error, "a model directory cannot be read");
                continue;
            }
        };
        for item in listing.flatten() {
            if entries.len() >= NAMES_MAX {
                tracing::warn!(directory = %directory.display(), limit = NAMES_MAX, "too many models; the rest is left out");
                return entries;
            }
            let path = item.path();
            let Some(name) = name_of(&path) else { continue };
            entries.entry(name).or_insert_with(|| inspect(path));
        }
    }
    entries
}

/// A model's name: its file's name without `.gguf`. None for other files and for names that cannot be asked for.
fn name_of(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
    is_name(name).then(|| name.to_owned())
}

/// True for what can be a model's name.
pub(super) fn is_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.chars().any(char::is_control)
}

/// What can be said of a file without opening it; links are followed, directories are the administrator's.
fn inspect(path: PathBuf) -> Entry {
    let (bytes, unusable) = match rustix::fs::stat(&path) {
        Err(errno) => (0, Some(errno.to_string())),
        Ok(stat) => {
            let bytes = u64::try_from(stat.st_size).unwrap_or(0);
            let kind = FileType::from_raw_mode(stat.st_mode);
            let why = if kind != FileType::RegularFile {
                Some("not a regular file".to_owned())
            } else if bytes == 0 {
                Some("the file is empty".to_owned())
            } else {
                let readable = rustix::fs::accessat(CWD, &path, Access::READ_OK, AtFlags::EACCESS);
                readable.err().map(|errno| format!("not readable by the daemon: {errno}"))
            };
            (bytes, why)
        }
    };
    Entry { path, bytes, unusable }
}

/// Opens a file for reading without waiting for the other end of a pipe.
pub(super) fn open(path: &Path) -> std::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_gguf_entries_count_and_bad_ones_say_why() {
        let first = tempfile::tempdir().unwrap();
        let second = tempfile::tempdir().unwrap();
        for (dir, file, content) in [
            (&first, "a.gguf", "x"),
            (&first, "notes.txt", "x"),
            (&second, "a.gguf", "yy"),
            (&second, "b.gguf", ""),
        ] {
            std::fs::write(dir.path().join(file), content).unwrap();
        }
        std::fs::create_dir(first.path().join("dir.gguf")).unwrap();
        std::os::unix::fs::symlink("nowhere", second.path().join("link.gguf")).unwrap();
        let missing = first.path().join("missing");
        let found = scan(&[first.path().into(), missing, second.path().into()]);

        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(names, ["a", "b", "dir", "link"]);
        assert_eq!((found["a"].bytes, &found["a"].unusable), (1, &None), "the first directory's");
        assert_eq!(found["b"].unusable.as_deref(), Some("the file is empty"));
        assert_eq!(found["dir"].unusable.as_deref(), Some("not a regular file"));
        assert!(found["link"].unusable.as_deref().is_some_and(|why| why.contains("No such file")));
    }

    #[test]
    fn names_are_short_and_printable() {
        assert!(is_name("llama-3.2 1b"));
        assert!(!is_name(""));
        assert!(!is_name("a\nb"));
        assert!(!is_name(&"x".repeat(NAME_BYTES_MAX + 1)));
    }
}
