//! Looks for models below a model directory: files in it and in directories below, and the caches of other programs.
//!
//! A model's name is its file's name without `.gguf`. Of equal names, the file with fewer directories on its way keeps it, then
//! the first of these ways in order. The others get their directories' names after it: `NAME@DIRECTORY.DIRECTORY`. LM Studio
//! keeps files so (`publisher/model/file.gguf`). Hugging Face's cache has `models--OWNER--REPOSITORY/snapshots/REVISION`, and
//! counts as `OWNER.REPOSITORY` at the revision that `refs/main` names. Ollama's files are in `ollama.rs` beside this file.
//!
//! Links to files are followed, links to directories are not: a way never leads back.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read};
use std::path::Path;

use super::directory::{Entry, Found, inspect, is_name, open};
use super::shards::{Shard, Shards};
use super::{NAMES_MAX, ollama};

/// Most directories below each other.
const DEPTH_MAX: usize = 8;

/// Most files and directories that are looked at. Each takes a microsecond or more, and every list of models asks anew.
const ITEMS_MAX: usize = 1 << 16;

/// Longest `refs/main`: a revision has 40 characters.
const REVISION_BYTES_MAX: u64 = 128;

/// A way below a model directory.
#[derive(Clone, Debug, Default)]
struct Way {
    /// Number of directories.
    depth: usize,
    /// Those that tell models apart.
    labels: Vec<String>,
}

impl Way {
    fn to(&self, label: Option<String>) -> Self {
        let labels = self.labels.iter().cloned().chain(label).collect();
        Self { depth: self.depth + 1, labels }
    }
}

/// Models of one directory.
struct Place {
    way: Way,
    entries: Vec<(String, Entry)>,
}

/// A directory's names.
#[derive(Default)]
struct Items {
    models: BTreeMap<String, Entry>,
    parts: Shards,
    directories: BTreeSet<String>,
}

/// A walk through a model directory.
pub(super) struct Walk<'a> {
    /// Called before each step with the device that it asks, if that is known.
    pub alive: &'a dyn Fn(Option<u64>),
    /// Files and directories so far.
    items: usize,
    models: usize,
    nameless: usize,
    places: Vec<Place>,
}

/// The models below a directory, at most [`NAMES_MAX`] + 1, and the number of further files with invalid names. Opens no
/// model's file. `alive` is called before each step with the device that it asks, if that is known.
pub(super) fn read(directory: &Path, alive: &dyn Fn(Option<u64>)) -> Found {
    let mut walk = Walk { alive, items: 0, models: 0, nameless: 0, places: Vec::new() };
    walk.directory(directory, &Way::default())?;
    alive(None);
    Ok(walk.named())
}

impl Walk<'_> {
    /// False once enough was looked at.
    fn goes_on(&mut self) -> bool {
        self.items += 1;
        self.items <= ITEMS_MAX && self.models <= NAMES_MAX
    }

    fn directory(&mut self, path: &Path, way: &Way) -> std::io::Result<()> {
        let Some(mut items) = self.items(path, way)? else { return Ok(()) };
        let parts = std::mem::take(&mut items.parts);
        for (name, entry) in parts.entries() {
            (self.alive)(None);
            items.models.entry(name).or_insert(entry);
        }
        self.add(way, items.models.into_iter().collect());
        let directories = items.directories;
        if ollama::is_root(&directories) {
            return ollama::read(self, path, way.depth);
        }
        if let Some(repository) = repository(path).filter(|_| directories.contains("snapshots")) {
            return self.snapshot(path, &way.to(Some(repository)));
        }
        for name in directories {
            if !self.goes_on() {
                break;
            }
            let label = repository(Path::new(&name)).is_none().then(|| name.clone());
            self.directory(&path.join(name), &way.to(label))?;
        }
        Ok(())
    }

    /// The names in a directory. `None` for one below the model directory that is gone, or that the daemon may not read.
    fn items(&mut self, path: &Path, way: &Way) -> std::io::Result<Option<Items>> {
        (self.alive)(None);
        let none = [ErrorKind::NotFound, ErrorKind::NotADirectory, ErrorKind::PermissionDenied];
        let mut listed = match std::fs::read_dir(path) {
            Err(error) if way.depth > 0 && none.contains(&error.kind()) => return Ok(None),
            listed => listed?,
        };
        let device = rustix::fs::stat(path)?.st_dev;
        let mut items = Items::default();
        loop {
            (self.alive)(Some(device));
            let Some(item) = listed.next().transpose()? else { break };
            if !self.goes_on() {
                break;
            }
            let path = item.path();
            let kind = item.file_type();
            if path.extension().is_none_or(|extension| extension != "gguf") {
                let name =
                    path.file_name().and_then(|name| name.to_str()).filter(|name| !name.starts_with('.'));
                if let Some(name) =
                    name.filter(|_| way.depth < DEPTH_MAX && kind.is_ok_and(|kind| kind.is_dir()))
                {
                    items.directories.insert(name.to_owned());
                }
                continue;
            }
            let Some(name) = name_of(&path) else {
                self.nameless += 1;
                continue;
            };
            self.models += 1;
            // The file of a link may be anywhere.
            let is_link = kind.is_ok_and(|kind| kind.is_symlink());
            match Shard::of(&name) {
                Some(part) => items.parts.add(&part, path),
                None => {
                    (self.alive)((!is_link).then_some(device));
                    items.models.insert(name, inspect(vec![path]));
                }
            }
        }
        Ok(Some(items))
    }

    /// The main revision of a repository in Hugging Face's cache, or the first one.
    fn snapshot(&mut self, repository: &Path, way: &Way) -> std::io::Result<()> {
        let snapshots = repository.join("snapshots");
        let Some(Items { directories, .. }) = self.items(&snapshots, way)? else { return Ok(()) };
        let main = self.small_file(&repository.join("refs/main"), REVISION_BYTES_MAX);
        let main = main.and_then(|bytes| String::from_utf8(bytes).ok()).map(|text| text.trim().to_owned());
        // A name that was listed leads nowhere else.
        let revision =
            main.filter(|main| directories.contains(main)).or_else(|| directories.first().cloned());
        match revision {
            Some(revision) => self.directory(&snapshots.join(revision), &way.to(None)),
            None => Ok(()),
        }
    }

    /// The bytes of a regular file, if it has no more than so many.
    pub fn small_file(&self, path: &Path, most: u64) -> Option<Vec<u8>> {
        (self.alive)(None);
        let file = open(path).ok()?;
        let regular = file.metadata().is_ok_and(|data| data.is_file() && data.len() <= most);
        let mut bytes = Vec::new();
        let read = regular && file.take(most).read_to_end(&mut bytes).is_ok();
        read.then_some(bytes)
    }

    /// Directories below one, and files in it, for a layout that has neither models nor links there.
    pub fn tree(&mut self, path: &Path) -> std::io::Result<(BTreeSet<String>, BTreeSet<String>)> {
        let (mut directories, mut files) = (BTreeSet::new(), BTreeSet::new());
        (self.alive)(None);
        let Ok(listed) = std::fs::read_dir(path) else { return Ok((directories, files)) };
        for item in listed {
            (self.alive)(None);
            let item = item?;
            if !self.goes_on() {
                break;
            }
            let (Ok(name), Ok(kind)) = (item.file_name().into_string(), item.file_type()) else { continue };
            match () {
                () if name.starts_with('.') => {}
                () if kind.is_dir() => drop(directories.insert(name)),
                () if kind.is_file() => drop(files.insert(name)),
                () => {}
            }
        }
        Ok((directories, files))
    }

    /// Adds models of another layout, whose names are told apart by these labels.
    pub fn add_labelled(&mut self, depth: usize, labels: Vec<String>, name: String, entry: Entry) {
        self.models += 1;
        self.add(&Way { depth, labels }, vec![(name, entry)]);
    }

    fn add(&mut self, way: &Way, entries: Vec<(String, Entry)>) {
        if !entries.is_empty() {
            self.places.push(Place { way: way.clone(), entries });
        }
    }

    /// All models by name.
    fn named(mut self) -> (BTreeMap<String, Entry>, usize) {
        self.places.sort_by(|one, other| {
            (one.way.depth, &one.way.labels).cmp(&(other.way.depth, &other.way.labels))
        });
        let mut named = BTreeMap::new();
        for Place { way, entries } in self.places {
            for (name, entry) in entries {
                let name =
                    if named.contains_key(&name) { format!("{name}@{}", way.labels.join(".")) } else { name };
                if named.contains_key(&name) || !is_name(&name) {
                    self.nameless += 1;
                } else {
                    named.insert(name, entry);
                }
            }
        }
        (named, self.nameless)
    }
}

/// A model's name: the file's name without `.gguf`. `None` for other files and invalid names.
fn name_of(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
    is_name(name).then(|| name.to_owned())
}

/// `OWNER.REPOSITORY` of a directory of Hugging Face's cache.
fn repository(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?.strip_prefix("models--")?;
    Some(name.replace("--", "."))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn write(root: &Path, path: &str) -> PathBuf {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, path.to_str().unwrap()).unwrap();
        path
    }

    fn names(root: &Path) -> Vec<String> {
        read(root, &|_| ()).unwrap().0.into_keys().collect()
    }

    #[test]
    fn equal_names_are_told_apart_by_their_directories() {
        let dir = tempfile::tempdir().unwrap();
        for path in
            ["a.gguf", "x/a.gguf", "one/two/a.gguf", "one/b.gguf", "two/b.gguf", ".hidden/c.gguf", "d.txt"]
        {
            write(dir.path(), path);
        }
        let (found, nameless) = read(dir.path(), &|_| ()).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), ["a", "a@one.two", "a@x", "b", "b@two"]);
        assert_eq!((found["a"].paths.clone(), nameless), (vec![dir.path().join("a.gguf")], 0));
        assert_eq!(found["b"].paths, [dir.path().join("one/b.gguf")]);
        std::fs::remove_file(dir.path().join("a.gguf")).unwrap();
        assert_eq!(names(dir.path()), ["a", "a@one.two", "b", "b@two"], "the name goes to the next");
    }

    #[test]
    fn parts_belong_together_in_one_directory_alone() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["x/m-00001-of-00002.gguf", "x/m-00002-of-00002.gguf", "y/m-00001-of-00002.gguf"] {
            write(dir.path(), path);
        }
        let (found, _) = read(dir.path(), &|_| ()).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), ["m", "m@y"]);
        assert_eq!(
            (found["m"].paths.len(), found["m"].incomplete, found["m@y"].incomplete),
            (2, false, true)
        );
    }

    #[test]
    fn the_cache_of_hugging_face_has_one_revision_of_each_repository() {
        let dir = tempfile::tempdir().unwrap();
        let repository = dir.path().join("hub/models--Owner--Some-GGUF");
        let blob = write(&repository, "blobs/0123");
        for revision in ["aaa", "bbb"] {
            let snapshot = repository.join("snapshots").join(revision);
            std::fs::create_dir_all(snapshot.join("sub")).unwrap();
            std::os::unix::fs::symlink("../../blobs/0123", snapshot.join("m.gguf")).unwrap();
            std::os::unix::fs::symlink("../../../blobs/0123", snapshot.join("sub/n.gguf")).unwrap();
        }
        let of = |revision: &str| {
            let (found, _) = read(dir.path(), &|_| ()).unwrap();
            assert_eq!(found.keys().collect::<Vec<_>>(), ["m", "n"]);
            assert_eq!(
                (found["m"].bytes, &found["m"].unusable),
                (blob.to_str().unwrap().len() as u64, &None)
            );
            assert!(found["n"].paths[0].ends_with(format!("{revision}/sub/n.gguf")));
        };
        of("aaa");
        write(&repository, "refs/main");
        std::fs::write(repository.join("refs/main"), "bbb\n").unwrap();
        of("bbb");
        for elsewhere in ["../snapshots/bbb", "/etc", "ccc", ""] {
            std::fs::write(repository.join("refs/main"), elsewhere).unwrap();
            of("aaa");
        }
        write(dir.path(), "m.gguf");
        assert_eq!(names(dir.path()), ["m", "m@hub.Owner.Some-GGUF", "n"]);
    }

    #[test]
    fn links_to_directories_lead_nowhere_and_deep_ones_are_not_read() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "x/a.gguf");
        std::os::unix::fs::symlink("..", dir.path().join("x/up")).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        write(elsewhere.path(), "b.gguf");
        std::os::unix::fs::symlink(elsewhere.path(), dir.path().join("x/elsewhere")).unwrap();
        write(dir.path(), &format!("{}deep.gguf", "d/".repeat(DEPTH_MAX)));
        write(dir.path(), &format!("{}deeper.gguf", "d/".repeat(DEPTH_MAX + 1)));
        assert_eq!(names(dir.path()), ["a", "deep"]);
        let long = format!("{}/a.gguf", "y".repeat(254));
        write(dir.path(), &long);
        let (found, nameless) = read(dir.path(), &|_| ()).unwrap();
        assert_eq!((found.len(), nameless), (2, 1), "a name too long is none");
    }
}
