//! Keeps prefixes across restarts and idle times: keys, values and recurrent states of prompts, in files.
//!
//! The engine hands over the known prefixes of a KV pool before the pool closes; a thread writes them. Before a request of that
//! user and model, the session reads the pages that the prompt begins with, and gives them to the engine. A file goes when all
//! of its pages were given back. Until then a later one takes its pages over. A file that is damaged, or of another model, is
//! removed, and nothing more of it is used: the prompt is computed then.
//!
//! Files lie in one folder a user, which the daemon alone may read. Together they have a limit; the oldest file of the user
//! with most bytes goes first.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sha2::{Digest as _, Sha256};

use crate::backend::KV_PAGE_TOKENS;
use crate::lock::{Mutex, Rank};
use crate::model::Model;
use crate::scheduler::{PrefixKeeper, PrefixPage, Prefixes, Reuse};

mod file;
pub mod sessions;
mod summed;

use file::{Digest, Known, Reader};

/// The folder of prefixes that all users share.
const SHARED: &str = "all";
const EXTENSION: &str = "prefixes";

/// After the engine had no room for a file's pages, they are not read for so long.
const REFUSED: Duration = Duration::from_secs(2);

/// Names a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The user; `None` where all users share prefixes.
    uid: Option<u32>,
    model: Digest,
}

/// A file that can be taken back.
#[derive(Debug)]
struct Kept {
    bytes: u64,
    /// Grows from file to file, in the order in which they were written.
    number: u64,
    /// After the first look at it.
    opened: Option<Opened>,
    /// The engine had no room for its pages: until then they are not offered again.
    refused_until: Option<Instant>,
}

/// The pages of a file, and those that were given back.
#[derive(Debug)]
struct Opened {
    known: Known,
    given: BTreeSet<u32>,
}

/// Pages that were read, and are to be given back.
#[derive(Debug)]
pub struct Offer {
    key: Key,
    number: u64,
    /// Their places in the file, in order of position.
    places: Vec<u32>,
    prefixes: Prefixes,
}

impl Offer {
    /// Takes the pages out.
    pub fn take(&mut self) -> Prefixes {
        let Prefixes { uid, layout, pages } = &mut self.prefixes;
        Prefixes { uid: *uid, layout: std::mem::take(layout), pages: std::mem::take(pages) }
    }
}

type Files = BTreeMap<Key, Kept>;

/// Prefixes to write.
#[derive(Debug)]
struct Task {
    key: Key,
    prefixes: Prefixes,
}

/// The files of kept prefixes and the thread that writes them.
#[derive(Debug)]
pub struct PrefixStore {
    dir: PathBuf,
    limit_bytes: u64,
    reuse: Reuse,
    files: Mutex<Files>,
    /// Bytes that wait to be written.
    queued: AtomicU64,
    tasks: Mutex<Option<Sender<Task>>>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

impl PrefixStore {
    /// Opens a folder, which is made if necessary, and starts the writer.
    ///
    /// # Errors
    /// [`io::Error`] if the folder cannot be made or read, or a thread not started.
    pub fn open(dir: &Path, limit_bytes: u64, reuse: Reuse) -> io::Result<Arc<Self>> {
        make_dir(dir)?;
        let files = scan(dir)?;
        let (sender, receiver) = channel();
        let store = Arc::new(Self {
            dir: dir.to_owned(),
            limit_bytes,
            reuse,
            files: Mutex::new(Rank::PrefixFiles, files),
            queued: AtomicU64::default(),
            tasks: Mutex::new(Rank::PrefixTasks, Some(sender)),
            writer: Mutex::new(Rank::PrefixTasks, None),
        });
        store.make_room(0, None);
        let writing = Arc::clone(&store);
        let thread =
            std::thread::Builder::new().name("prefixes".into()).spawn(move || writing.run(&receiver))?;
        *store.writer.lock() = Some(thread);
        Ok(store)
    }

    /// Number of files and their bytes.
    pub fn sums(&self) -> (usize, u64) {
        let files = self.files.lock();
        (files.len(), files.values().map(|kept| kept.bytes).sum())
    }

    /// The name of a user's file of a model, whether there is one or not.
    pub fn key(&self, uid: u32, model: &Model) -> Key {
        Key { uid: (self.reuse != Reuse::All).then_some(uid), model: digest(model) }
    }

    /// Whether there is no file at all.
    pub fn is_empty(&self) -> bool {
        self.files.lock().is_empty()
    }

    /// Whether the file of that name may have pages of this prompt that were not given back.
    pub fn has(&self, key: &Key, prompt: &[u32]) -> bool {
        let files = self.files.lock();
        let Some(kept) = files.get(key) else { return false };
        if kept.refused_until.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        let has = |Opened { known, given }: &Opened| {
            let path = known.index.path(prompt);
            known.index.telling(&path).iter().any(|page| !given.contains(page))
        };
        kept.opened.as_ref().is_none_or(has)
    }

    /// Reads the pages of a file that a prompt begins with. `None` without any, or if the file is of no use: then it is
    /// removed. The index is read once for each file. Tell [`PrefixStore::given`] what became of the pages. Blocks.
    pub fn read(&self, key: Key, prompt: &[u32]) -> Option<Offer> {
        let (number, known) = {
            let files = self.files.lock();
            let kept = files.get(&key)?;
            (kept.number, kept.opened.as_ref().map(|opened| opened.known.clone()))
        };
        let path = self.path(&key);
        let read = Reader::open_known(&path, &key.model, key.uid, known).and_then(|reader| {
            let places = reader.known.index.path(prompt);
            Ok((reader.prefixes(&places, key.uid)?, places, reader.known))
        });
        match read {
            Ok((prefixes, places, known)) => {
                self.looked(&key, number, known);
                Some(Offer { key, number, places, prefixes }).filter(|offer| !offer.places.is_empty())
            }
            Err(error) => {
                tracing::warn!(file = %path.display(), %error, "a file of kept prefixes is removed: it cannot be used");
                self.drop_file(&key, number);
                None
            }
        }
    }

    /// Notes a file's index.
    fn looked(&self, key: &Key, number: u64, known: Known) {
        let mut files = self.files.lock();
        let kept = files.get_mut(key).filter(|kept| kept.number == number);
        if let Some(kept) = kept {
            kept.opened.get_or_insert_with(|| Opened { known, given: BTreeSet::new() });
        }
    }

    /// Notes that the engine took the first `taken` pages of an offer. The others stay in the file, and are not read again
    /// for 2 s. A file of which all were taken is removed. Blocks.
    pub fn given(&self, offer: &Offer, taken: u32) {
        let Offer { key, number, places, .. } = offer;
        let mut files = self.files.lock();
        let Some(kept) = files.get_mut(key).filter(|kept| kept.number == *number) else { return };
        let Some(opened) = &mut kept.opened else { return };
        let taken = (taken as usize).min(places.len());
        // A state before the last one was not offered: it may be to another prompt.
        let whole = |page: &&u32| !opened.known.index.has_state(**page) || places.last() == Some(*page);
        opened.given.extend(places[..taken].iter().filter(whole));
        let all = opened.given.len() == opened.known.index.len();
        kept.refused_until = (taken < places.len()).then(|| Instant::now() + REFUSED);
        drop(files);
        if all {
            self.drop_file(key, *number);
        }
    }

    /// Removes a file, unless it was replaced.
    fn drop_file(&self, key: &Key, number: u64) {
        let mut files = self.files.lock();
        let of = files.get(key).is_some_and(|kept| kept.number == number);
        let gone = of.then(|| files.remove(key)).flatten();
        drop(files);
        if gone.is_some() {
            remove(&self.path(key));
        }
    }

    /// Removes the files of a model, or all. Returns how many.
    pub fn forget(&self, model: Option<&Model>) -> usize {
        let of = model.map(digest);
        let is_of = |digest: &Digest| of.is_none_or(|of| of == *digest);
        let mut files = self.files.lock();
        let gone: Vec<Key> = files.keys().filter(|key| is_of(&key.model)).copied().collect();
        files.retain(|key, _| !is_of(&key.model));
        drop(files);
        gone.iter().for_each(|key| remove(&self.path(key)));
        gone.len()
    }

    /// Writes what is queued, and ends the writer. Blocks until that is done.
    pub fn finish(&self) {
        drop(self.tasks.lock().take());
        let writer = self.writer.lock().take();
        if let Some(writer) = writer
            && writer.join().is_err()
        {
            tracing::error!("the writer of kept prefixes panicked: some are lost");
        }
    }

    fn run(&self, tasks: &Receiver<Task>) {
        for Task { key, prefixes } in tasks {
            let bytes = bytes_of(&prefixes);
            self.make_room(bytes, Some(key));
            let path = self.path(&key);
            let there = self.files.lock().contains_key(&key);
            let old = there.then(|| Reader::open(&path, &key.model, key.uid).ok()).flatten();
            let room = self.room_beside(key).saturating_sub(bytes);
            let write = |old| file::write(&path, &key.model, &prefixes, old);
            let written = path.parent().map_or(Ok(()), make_dir).and_then(|()| {
                let both = old.as_ref().map(|old| write(Some((old, room))));
                both.and_then(Result::ok).map_or_else(|| write(None), Ok)
            });
            match written {
                Ok(bytes) => {
                    let mut files = self.files.lock();
                    let number = next_number(&files);
                    let forgotten = there && !files.contains_key(&key);
                    if !forgotten {
                        files.insert(key, Kept { bytes, number, opened: None, refused_until: None });
                    }
                    drop(files);
                    if forgotten {
                        remove(&path); // somebody dropped the old pages meanwhile
                    }
                }
                Err(error) => {
                    tracing::warn!(file = %path.display(), %error, "prefixes could not be kept: they are computed again");
                }
            }
            self.queued.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Bytes that the file of that name may have beside all others.
    fn room_beside(&self, key: Key) -> u64 {
        let files = self.files.lock();
        let others = files.iter().filter(|(of, _)| **of != key).map(|(_, kept)| kept.bytes);
        self.limit_bytes.saturating_sub(others.sum())
    }

    /// Removes files until `bytes` more fit beside those of others than `key`.
    fn make_room(&self, bytes: u64, key: Option<Key>) {
        while let Some(oldest) = self.next_to_go(bytes, key) {
            remove(&self.path(&oldest));
        }
    }

    /// Takes the oldest file of the user with most bytes out of the list, if all together are too large.
    fn next_to_go(&self, bytes: u64, key: Option<Key>) -> Option<Key> {
        let mut files = self.files.lock();
        let others = || files.iter().filter(|(of, _)| Some(**of) != key);
        let mut of_users: BTreeMap<Option<u32>, u64> = BTreeMap::new();
        others().for_each(|(of, kept)| *of_users.entry(of.uid).or_default() += kept.bytes);
        if of_users.values().sum::<u64>().saturating_add(bytes) <= self.limit_bytes {
            return None;
        }
        let most = of_users.iter().max_by_key(|(_, bytes)| **bytes).map(|(uid, _)| *uid)?;
        let of_most = others().filter(|(of, _)| of.uid == most);
        let oldest = of_most.min_by_key(|(_, kept)| kept.number).map(|(key, _)| *key)?;
        files.remove(&oldest);
        Some(oldest)
    }

    fn path(&self, key: &Key) -> PathBuf {
        let user = key.uid.map_or_else(|| SHARED.to_owned(), |uid| uid.to_string());
        let name: String = key.model.iter().map(|byte| format!("{byte:02x}")).collect();
        self.dir.join(user).join(name).with_extension(EXTENSION)
    }
}

impl PrefixKeeper for PrefixStore {
    fn room(&self, page_bytes: u64) -> u64 {
        let left = self.limit_bytes.saturating_sub(self.queued.load(Ordering::Relaxed));
        left.saturating_sub(file::HEADER_BYTES_MAX) / page_bytes.saturating_add(file::PAGE_BYTES_BESIDE)
    }

    fn keep(&self, model: &Arc<Model>, prefixes: Prefixes) {
        let tasks = self.tasks.lock();
        let Some(sender) = tasks.as_ref() else { return };
        let bytes = bytes_of(&prefixes);
        self.queued.fetch_add(bytes, Ordering::Relaxed);
        let key = Key { uid: prefixes.uid, model: digest(model) };
        if sender.send(Task { key, prefixes }).is_err() {
            self.queued.fetch_sub(bytes, Ordering::Relaxed); // the writer has ended
        }
    }
}

/// Bytes of a file, at most.
fn bytes_of(prefixes: &Prefixes) -> u64 {
    let of_page = |page: &PrefixPage| {
        let state = page.state.as_ref().map_or(0, Vec::len);
        page.bytes.len() as u64 + state as u64 + file::PAGE_BYTES_BESIDE
    };
    prefixes.pages.iter().map(of_page).sum::<u64>() + file::HEADER_BYTES_MAX
}

/// Digest of the identities of a model's files. The device number is left out: it may change with a restart of the machine.
pub fn fingerprint(model: &Model) -> [u8; 32] {
    let mut sum = Sha256::new();
    for file in model.files.mappings() {
        let of = file.identity();
        sum.update(of.ino.to_le_bytes());
        sum.update(of.size.to_le_bytes());
        sum.update(of.mtime_ns.to_le_bytes());
        sum.update(of.ctime_ns.to_le_bytes());
    }
    sum.finalize().into()
}

/// Digest of a model's files and of the program that computes it.
fn digest(model: &Model) -> Digest {
    let mut sum = Sha256::new();
    sum.update(env!("CARGO_PKG_VERSION"));
    sum.update((KV_PAGE_TOKENS as u64).to_le_bytes());
    sum.update(fingerprint(model));
    sum.finalize().into()
}

/// Makes a folder that the daemon alone may read, if it is not there yet.
///
/// # Errors
/// [`io::Error`].
pub fn make_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// A file that is gone already is as good as removed.
fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(file = %path.display(), %error, "a kept file could not be removed");
    }
}

/// Files of an earlier daemon, the oldest first. Removes those that were not finished.
fn scan(dir: &Path) -> io::Result<Files> {
    let mut found = Vec::new();
    for user in fs::read_dir(dir)?.flatten() {
        let name = user.file_name();
        let uid = match name.to_str() {
            Some(SHARED) => None,
            Some(name) if name.parse::<u32>().is_ok() => name.parse().ok(),
            _ => continue,
        };
        for file in fs::read_dir(user.path()).into_iter().flatten().flatten() {
            let path = file.path();
            let model = path.file_stem().and_then(|name| digest_of_name(name.to_str()?));
            let extension = path.extension().and_then(|extension| extension.to_str());
            match (model, extension, file.metadata()) {
                (Some(model), Some(EXTENSION), Ok(metadata)) if metadata.is_file() => {
                    found.push((metadata.modified().ok(), Key { uid, model }, metadata.len()));
                }
                (_, Some(summed::PART), _) => remove(&path),
                _ => {} // not ours
            }
        }
    }
    found.sort_by_key(|(modified, ..)| *modified);
    let numbered = found.into_iter().zip(0..);
    Ok(numbered
        .map(|((_, key, bytes), number)| (key, Kept { bytes, number, opened: None, refused_until: None }))
        .collect())
}

fn next_number(files: &Files) -> u64 {
    files.values().map(|kept| kept.number + 1).max().unwrap_or(0)
}

fn digest_of_name(name: &str) -> Option<Digest> {
    let mut digest = [0; 32];
    if name.len() != 2 * digest.len() || !name.is_ascii() {
        return None;
    }
    for (byte, at) in digest.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(name.get(at..at + 2)?, 16).ok()?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests;
