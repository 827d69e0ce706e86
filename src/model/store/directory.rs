//! The models found in the directories, and the facts of a file that need no opening.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags};
use unicode_properties::{GeneralCategory, UnicodeGeneralCategory};

use super::{NAME_BYTES_MAX, NAMES_MAX};

/// A model in a directory: a `.gguf` file, or the parts of a split one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// The files present, in part order.
    pub paths: Vec<PathBuf>,
    /// Total size of the files.
    pub bytes: u64,
    /// The reason why it cannot be a model, if that shows without opening it.
    pub unusable: Option<String>,
    /// True when parts are missing; `unusable` names them.
    pub incomplete: bool,
    /// Device number of the first file's mount, if it could be examined.
    pub device: Option<u64>,
}

impl Entry {
    /// Opens all files.
    ///
    /// # Errors
    /// The `open` error of the first file that fails.
    pub fn open(&self) -> std::io::Result<Vec<File>> {
        self.paths.iter().map(|path| open(path)).collect()
    }
}

/// The result of the last scan of each directory.
///
/// An unreadable directory keeps its names: a daemon short of descriptors or a brief disk fault is no reason to unmap
/// models. So does one whose scan hangs. A removed directory has no names.
#[derive(Debug, Default)]
pub(super) struct Looks {
    directories: HashMap<PathBuf, Look>,
    /// The directory whose names exceeded [`NAMES_MAX`].
    cut_off: Option<PathBuf>,
}

/// The last scan of one directory.
#[derive(Debug, Default)]
struct Look {
    entries: BTreeMap<String, Entry>,
    /// Files with invalid names.
    nameless: usize,
    /// The error of the last read.
    fault: Option<ErrorKind>,
    state: Busy,
}

/// Whether a directory is being read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Busy {
    #[default]
    No,
    Reads,
    /// For so long that nobody waits for it any more.
    Hangs,
}

/// Contents of one directory: models by name, and the number of files with invalid names.
pub(super) type Found = std::io::Result<(BTreeMap<String, Entry>, usize)>;

impl Looks {
    /// Forgets all other directories. Returns those to read now: all but the ones that are still being read.
    pub(super) fn begin(&mut self, directories: &[PathBuf]) -> Vec<PathBuf> {
        // One that hangs is remembered, so that it is not read a second time if it comes back.
        self.directories.retain(|directory, look| directories.contains(directory) || look.state != Busy::No);
        let mut free = Vec::new();
        for directory in directories {
            let look = self.directories.entry(directory.clone()).or_default();
            if look.state == Busy::No {
                look.state = Busy::Reads;
                free.push(directory.clone());
            }
        }
        free
    }

    /// True while a directory is read that does not hang.
    pub(super) fn is_busy(&self) -> bool {
        self.directories.values().any(|look| look.state == Busy::Reads)
    }

    /// Waits no more for directories that are being read; logs each once.
    pub(super) fn give_up(&mut self) {
        for (directory, look) in self.directories.iter_mut().filter(|(_, look)| look.state == Busy::Reads) {
            look.state = Busy::Hangs;
            let names_kept = look.entries.len();
            tracing::warn!(directory = %directory.display(), names_kept, "a model directory does not answer; its known names stay, and it is read no further until it does");
        }
    }

    /// Takes the result of reading a directory. True if nobody waited for it any more.
    pub(super) fn read(&mut self, directory: &Path, found: Found) -> bool {
        let Some(look) = self.directories.get_mut(directory) else { return false };
        let hung = std::mem::take(&mut look.state) == Busy::Hangs;
        if hung {
            tracing::info!(directory = %directory.display(), "a model directory answers again");
        }
        look.update(directory, found);
        hung
    }

    /// All models of `directories` by name. Of equal names, the first directory's is served. Within a directory, a whole
    /// file precedes a split one, and fewer parts precede more.
    ///
    /// A fault is logged once when it begins and once when it ends, because clients can trigger scans as often as they
    /// like.
    pub(super) fn all(&mut self, directories: &[PathBuf]) -> BTreeMap<String, Entry> {
        let mut all: BTreeMap<String, Entry> = BTreeMap::new();
        let mut cut_off = None;
        for directory in directories {
            for (name, entry) in self.directories.get(directory).into_iter().flat_map(|look| &look.entries) {
                if all.len() < NAMES_MAX {
                    all.entry(name.clone()).or_insert_with(|| entry.clone());
                } else if !all.contains_key(name) {
                    cut_off = Some(directory);
                }
            }
        }
        if cut_off != self.cut_off.as_ref() {
            if let Some(directory) = cut_off {
                tracing::warn!(directory = %directory.display(), limit = NAMES_MAX, "too many models; the rest are ignored");
            }
            self.cut_off = cut_off.cloned();
        }
        all
    }
}

impl Look {
    fn update(&mut self, directory: &Path, found: Found) {
        let fault = match found {
            Ok((entries, nameless)) => {
                self.entries = entries;
                if self.nameless != nameless && nameless > 0 {
                    let directory = directory.display();
                    tracing::warn!(%directory, nameless, "*.gguf files are ignored: rename them; a model's name is UTF-8 of 1 to {NAME_BYTES_MAX} bytes without control characters");
                }
                self.nameless = nameless;
                None
            }
            Err(error) => {
                let kind = error.kind();
                if matches!(kind, ErrorKind::NotFound | ErrorKind::NotADirectory) {
                    self.entries.clear();
                }
                if self.fault != Some(kind) {
                    let names_kept = self.entries.len();
                    tracing::warn!(directory = %directory.display(), %error, names_kept, "a model directory cannot be read");
                }
                Some(kind)
            }
        };
        if fault.is_none() && self.fault.is_some() {
            tracing::info!(directory = %directory.display(), "a model directory can be read again");
        }
        self.fault = fault;
    }
}

/// True for a valid model name: one that readers can tell from others. No character of it shows nothing, steers a terminal
/// or turns the text around, and U+0020 is its only white space, inside.
pub(super) fn is_name(name: &str) -> bool {
    let plain = |c: char| c == ' ' || !(c.is_whitespace() || is_hidden(c));
    (1..=NAME_BYTES_MAX).contains(&name.len()) && name.trim() == name && name.chars().all(plain)
}

fn is_hidden(c: char) -> bool {
    use GeneralCategory::{Control, Format, LineSeparator, ParagraphSeparator, PrivateUse, Unassigned};
    [Control, Format, LineSeparator, ParagraphSeparator, PrivateUse, Unassigned]
        .contains(&c.general_category())
}

/// Inspects files without opening them. Follows links: the administrator controls the directories.
pub(super) fn inspect(paths: Vec<PathBuf>) -> Entry {
    let split = paths.len() > 1;
    let (mut bytes, mut unusable, mut device) = (0u64, None, None);
    for path in &paths {
        let (more, why, on) = inspect_file(path);
        device = device.or(on);
        bytes = bytes.saturating_add(more);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let why = why.map(|why| if split { format!("{name}: {why}") } else { why });
        unusable = unusable.or(why);
    }
    Entry { paths, bytes, unusable, incomplete: false, device }
}

/// The file's size, the reason why it cannot be a model, and the device number of its mount.
fn inspect_file(path: &Path) -> (u64, Option<String>, Option<u64>) {
    let stat = match rustix::fs::stat(path) {
        Err(errno) => return (0, Some(errno.to_string()), None),
        Ok(stat) => stat,
    };
    let bytes = u64::try_from(stat.st_size).unwrap_or(0);
    let why = if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        Some("not a regular file".to_owned())
    } else if bytes == 0 {
        Some("the file is empty".to_owned())
    } else {
        let readable = rustix::fs::accessat(CWD, path, Access::READ_OK, AtFlags::EACCESS);
        readable.err().map(|errno| format!("not readable by the daemon: {errno}"))
    };
    (bytes, why, Some(stat.st_dev))
}

/// Opens a file for reading without waiting for the writer of a pipe.
pub(super) fn open(path: &Path) -> std::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;
    use crate::model::store::walk::read;

    impl Looks {
        fn look(&mut self, directories: &[PathBuf]) -> BTreeMap<String, Entry> {
            for directory in self.begin(directories) {
                let found = read(&directory, &|_| ());
                assert!(!self.read(&directory, found));
            }
            self.all(directories)
        }
    }

    #[test]
    fn a_directory_that_hangs_keeps_its_names_and_is_not_read_twice() {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let directories = dirs.each_ref().map(|dir| dir.path().to_path_buf());
        std::fs::write(directories[0].join("a.gguf"), "x").unwrap();
        std::fs::write(directories[1].join("b.gguf"), "x").unwrap();
        let mut looks = Looks::default();
        assert_eq!(looks.look(&directories).len(), 2);
        assert_eq!(looks.begin(&directories), directories);
        looks.read(&directories[0], read(&directories[0], &|_| ()));
        assert!(looks.is_busy());
        looks.give_up();
        assert!(!looks.is_busy());
        assert_eq!(looks.all(&directories).len(), 2, "the known names stay");
        assert_eq!(looks.begin(&directories[..1]), directories[..1], "the other one hangs");
        assert!(looks.begin(&directories).is_empty());
        std::fs::remove_file(directories[1].join("b.gguf")).unwrap();
        assert!(looks.read(&directories[1], read(&directories[1], &|_| ())), "nobody waited");
        assert_eq!(looks.all(&directories).into_keys().collect::<Vec<_>>(), ["a"]);
    }

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
        let found = Looks::default().look(&[first.path().into(), missing, second.path().into()]);

        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(names, ["a", "b", "dir", "link"]);
        assert_eq!((found["a"].bytes, &found["a"].unusable), (1, &None), "the first directory's");
        assert_eq!(found["b"].unusable.as_deref(), Some("the file is empty"));
        assert_eq!(found["dir"].unusable.as_deref(), Some("not a regular file"));
        assert!(found["link"].unusable.as_deref().is_some_and(|why| why.contains("No such file")));
    }

    #[test]
    fn a_directory_that_cannot_be_read_keeps_its_names_and_one_that_is_gone_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("models");
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(directory.join("a.gguf"), "x").unwrap();
        let directories = [directory.clone()];
        let mut looks = Looks::default();
        let names = |looks: &mut Looks| looks.look(&directories).into_keys().collect::<Vec<_>>();
        assert_eq!(names(&mut looks), ["a"]);
        // A link to itself is unreadable, even for root.
        std::fs::rename(&directory, dir.path().join("away")).unwrap();
        std::os::unix::fs::symlink(&directory, &directory).unwrap();
        assert_eq!(names(&mut looks), ["a"], "unreadable");
        std::fs::remove_file(&directory).unwrap();
        assert_eq!(names(&mut looks), [""; 0], "gone");
        std::fs::rename(dir.path().join("away"), &directory).unwrap();
        assert_eq!(names(&mut looks), ["a"], "back");
        assert_eq!(Looks::default().look(&[]), BTreeMap::new());
    }

    #[test]
    fn parts_are_one_model_and_whole_files_go_before() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a-00002-of-00002", "a-00001-of-00002", "b", "b-00001-of-00001", "c-00001-of-00001"] {
            std::fs::write(dir.path().join(name).with_extension("gguf"), name).unwrap();
        }
        let found = Looks::default().look(&[dir.path().into()]);
        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(names, ["a", "b", "c"]);
        assert_eq!((found["a"].bytes, found["a"].paths.len(), &found["a"].unusable), (32, 2, &None));
        assert!(found["b"].paths[0].ends_with("b.gguf"));
        assert!(found["c"].paths[0].ends_with("c-00001-of-00001.gguf"));
    }

    #[test]
    fn files_that_nobody_can_name_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let not_utf8 = std::ffi::OsStr::from_bytes(b"caf\xe9.gguf");
        for name in [not_utf8, "a\tb.gguf".as_ref(), "c.gguf".as_ref(), "caf\u{e9}.gguf".as_ref()] {
            std::fs::write(dir.path().join(name), "x").unwrap();
        }
        let mut looks = Looks::default();
        let names: Vec<String> = looks.look(&[dir.path().into()]).into_keys().collect();
        assert_eq!(names, ["c", "caf\u{e9}"]);
        assert_eq!(looks.directories[dir.path()].nameless, 2);
    }

    #[test]
    fn names_past_the_limit_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        for n in 0..=NAMES_MAX {
            std::fs::write(dir.path().join(format!("{n}.gguf")), "").unwrap();
        }
        let mut looks = Looks::default();
        let directories = [dir.path().to_path_buf()];
        assert_eq!(looks.look(&directories).len(), NAMES_MAX);
        assert_eq!(looks.cut_off.as_ref(), directories.first());
        std::fs::remove_file(dir.path().join("0.gguf")).unwrap();
        assert_eq!(looks.look(&directories).len(), NAMES_MAX);
        assert_eq!(looks.cut_off, None);
    }

    #[test]
    fn names_are_short_and_printable() {
        assert!(is_name("llama-3.2 1b"));
        assert!(!is_name(""));
        for hidden in "\n\u{7f}\u{9b}\u{ad}\u{200b}\u{202e}\u{2028}\u{2029}\u{e0041}\u{e000}\u{378}".chars() {
            assert!(!is_name(&format!("a{hidden}b")), "{hidden:?}");
        }
        assert!(!is_name(" a") && !is_name("a ") && !is_name(" ") && is_name("a b"));
        assert!(is_name("模型-é"));
        assert!(!is_name(&"x".repeat(NAME_BYTES_MAX + 1)));
    }
}
