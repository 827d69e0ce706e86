//! Keeps prefixes across restarts and idle times: keys and values of prompts, in files that the next engine takes back.
//!
//! The engine hands over what a KV pool knows before the pool closes; a thread writes it. The first request of a user for a
//! model takes the file back before it is computed, and the file goes. A file that is damaged, or of another model, is removed
//! and nothing of it is used: the prompt is computed then.
//!
//! Files lie in one folder a user, which the daemon alone may read. Together they have a limit; the oldest file of the user
//! with most bytes goes first.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::SystemTime;

use sha2::{Digest as _, Sha256};
use tokio::sync::OnceCell;

use crate::backend::KV_PAGE_TOKENS;
use crate::lock::{Mutex, Rank};
use crate::model::Model;
use crate::scheduler::{EngineHandle, PrefixKeeper, Prefixes, Reuse};

mod file;

use file::Digest;

/// The folder of prefixes that all users share.
const SHARED: &str = "all";
const EXTENSION: &str = "prefixes";

/// The user, `None` for all, and the model.
type Key = (Option<u32>, Digest);

/// A file that can be taken back.
#[derive(Clone, Copy, Debug)]
struct Kept {
    bytes: u64,
    written: SystemTime,
}

/// Files, and requests that wait for one.
#[derive(Debug, Default)]
struct Files {
    kept: BTreeMap<Key, Kept>,
    coming: BTreeMap<Key, Arc<OnceCell<()>>>,
}

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
    queued: Arc<AtomicU64>,
    tasks: Mutex<Option<Sender<Task>>>,
    writer: Mutex<Option<JoinHandle<()>>>,
    /// One file is read at a time: it may have the limit's bytes.
    reading: tokio::sync::Mutex<()>,
}

impl PrefixStore {
    /// Opens a folder, which is made if necessary, and starts the writer.
    ///
    /// # Errors
    /// [`io::Error`] if the folder cannot be made or read, or a thread not started.
    pub fn open(dir: &Path, limit_bytes: u64, reuse: Reuse) -> io::Result<Arc<Self>> {
        make_dir(dir)?;
        let kept = scan(dir)?;
        let (sender, receiver) = channel();
        let store = Arc::new(Self {
            dir: dir.to_owned(),
            limit_bytes,
            reuse,
            files: Mutex::new(Rank::PrefixFiles, Files { kept, ..Files::default() }),
            queued: Arc::default(),
            tasks: Mutex::new(Rank::PrefixTasks, Some(sender)),
            writer: Mutex::new(Rank::PrefixTasks, None),
            reading: tokio::sync::Mutex::default(),
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
        (files.kept.len(), files.kept.values().map(|kept| kept.bytes).sum())
    }

    /// Gives a user's kept prefixes of a model back to the engine, if there are any. Requests that come meanwhile wait for
    /// the same. Costs nothing without a file.
    pub async fn restore(self: &Arc<Self>, engine: &EngineHandle, uid: u32, model: &Arc<Model>) {
        let Some((key, cell)) = self.coming(uid, model) else { return };
        let work = || async {
            let (store, engine, model) = (Arc::clone(self), engine.clone(), Arc::clone(model));
            // A request that is cancelled meanwhile does not take the file with it.
            let task = tokio::spawn(async move { store.bring(&engine, key, uid, &model).await });
            let _ = task.await; // it fails only while the daemon ends
        };
        cell.get_or_init(work).await;
        self.files.lock().coming.remove(&key);
    }

    fn coming(&self, uid: u32, model: &Model) -> Option<(Key, Arc<OnceCell<()>>)> {
        {
            let files = self.files.lock();
            if files.kept.is_empty() && files.coming.is_empty() {
                return None;
            }
        }
        let key = ((self.reuse != Reuse::All).then_some(uid), digest(model));
        let mut files = self.files.lock();
        let cell = match files.coming.get(&key) {
            Some(cell) => Arc::clone(cell),
            None if files.kept.contains_key(&key) => Arc::clone(files.coming.entry(key).or_default()),
            None => return None,
        };
        Some((key, cell))
    }

    async fn bring(self: &Arc<Self>, engine: &EngineHandle, key: Key, uid: u32, model: &Arc<Model>) {
        let _alone = self.reading.lock().await;
        let store = Arc::clone(self);
        let read = tokio::task::spawn_blocking(move || store.take(key)).await;
        let Ok(Some(prefixes)) = read else { return };
        let pages = prefixes.pages.len();
        match engine.restore_prefixes(model, uid, prefixes).await {
            Ok(taken) => {
                tracing::info!(uid, model = model.name, pages, taken, "kept prefixes are back on the device")
            }
            Err(error) => tracing::info!(uid, model = model.name, %error, "kept prefixes are of no use now"),
        }
    }

    /// Reads a file and removes it. `None` if it is gone or of no use.
    fn take(&self, key: Key) -> Option<Prefixes> {
        self.files.lock().kept.remove(&key)?;
        let path = self.path(&key);
        let read = file::read(&path, &key.1, key.0);
        remove(&path);
        read.inspect_err(|error| {
            tracing::warn!(file = %path.display(), %error, "a file of kept prefixes is removed: it cannot be used");
        })
        .ok()
    }

    /// Removes the files of a model, or all. Returns how many.
    pub fn forget(&self, model: Option<&Model>) -> usize {
        let of = model.map(digest);
        let is_of = |digest: &Digest| of.is_none_or(|of| of == *digest);
        let gone: Vec<Key> =
            self.files.lock().kept.extract_if(.., |key, _| is_of(&key.1)).map(|(key, _)| key).collect();
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
            let written =
                path.parent().map_or(Ok(()), make_dir).and_then(|()| file::write(&path, &key.1, &prefixes));
            match written {
                Ok(bytes) => {
                    let kept = Kept { bytes, written: SystemTime::now() };
                    self.files.lock().kept.insert(key, kept);
                }
                Err(error) => {
                    tracing::warn!(file = %path.display(), %error, "prefixes could not be kept: they are computed again");
                }
            }
            self.queued.fetch_sub(bytes, Ordering::Relaxed);
        }
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
        let mut of_users: BTreeMap<Option<u32>, u64> = BTreeMap::new();
        for ((uid, _), kept) in files.kept.iter().filter(|(of, _)| Some(**of) != key) {
            *of_users.entry(*uid).or_default() += kept.bytes;
        }
        if of_users.values().sum::<u64>().saturating_add(bytes) <= self.limit_bytes {
            return None;
        }
        let most = of_users.iter().max_by_key(|(_, bytes)| **bytes).map(|(uid, _)| *uid)?;
        let of_most = files.kept.iter().filter(|(of, _)| of.0 == most && Some(**of) != key);
        let oldest = of_most.min_by_key(|(_, kept)| kept.written).map(|(key, _)| *key)?;
        files.kept.remove(&oldest);
        Some(oldest)
    }

    fn path(&self, (uid, digest): &Key) -> PathBuf {
        let user = uid.map_or_else(|| SHARED.to_owned(), |uid| uid.to_string());
        let name: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        self.dir.join(user).join(name).with_extension(EXTENSION)
    }
}

impl PrefixKeeper for PrefixStore {
    fn room_bytes(&self) -> u64 {
        self.limit_bytes.saturating_sub(self.queued.load(Ordering::Relaxed))
    }

    fn keep(&self, model: &Arc<Model>, prefixes: Prefixes) {
        let tasks = self.tasks.lock();
        let Some(sender) = tasks.as_ref() else { return };
        let bytes = bytes_of(&prefixes);
        self.queued.fetch_add(bytes, Ordering::Relaxed);
        let key = (prefixes.uid, digest(model));
        if sender.send(Task { key, prefixes }).is_err() {
            self.queued.fetch_sub(bytes, Ordering::Relaxed); // the writer has ended
        }
    }
}

fn bytes_of(prefixes: &Prefixes) -> u64 {
    prefixes.pages.iter().map(|page| page.bytes.len() as u64).sum()
}

/// Digest of a model's files and of the program that computes it. The device number is left out: it may change with a
/// restart of the machine.
fn digest(model: &Model) -> Digest {
    let mut sum = Sha256::new();
    sum.update(env!("CARGO_PKG_VERSION"));
    sum.update((KV_PAGE_TOKENS as u64).to_le_bytes());
    for file in model.files.mappings() {
        let of = file.identity();
        sum.update(of.ino.to_le_bytes());
        sum.update(of.size.to_le_bytes());
        sum.update(of.mtime_ns.to_le_bytes());
        sum.update(of.ctime_ns.to_le_bytes());
    }
    sum.finalize().into()
}

fn make_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// A file that is gone already is as good as removed.
fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(file = %path.display(), %error, "a file of kept prefixes could not be removed");
    }
}

/// Files of an earlier daemon. Removes those that were not finished.
fn scan(dir: &Path) -> io::Result<BTreeMap<Key, Kept>> {
    let mut kept = BTreeMap::new();
    for user in fs::read_dir(dir)?.flatten() {
        let name = user.file_name();
        let uid = match name.to_str() {
            Some(SHARED) => None,
            Some(name) => match name.parse() {
                Ok(uid) => Some(uid),
                Err(_) => continue,
            },
            None => continue,
        };
        for file in fs::read_dir(user.path()).into_iter().flatten().flatten() {
            let path = file.path();
            let digest = path.file_stem().and_then(|name| digest_of_name(name.to_str()?));
            let right = path.extension().is_some_and(|extension| extension == EXTENSION);
            match (digest, file.metadata()) {
                (Some(digest), Ok(metadata)) if right && metadata.is_file() => {
                    let written = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                    kept.insert((uid, digest), Kept { bytes: metadata.len(), written });
                }
                _ if path.extension().is_some_and(|extension| extension == file::PART) => remove(&path),
                _ => {} // not ours
            }
        }
    }
    Ok(kept)
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
