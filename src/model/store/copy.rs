//! Copies of files in memory, for files on file systems whose server may hang.
//!
//! A mapped page of such a file may never come, and the engine thread that touches it would stand still for all users.
//! So the file is read once, on a thread that may be lost, into a memory file without a name. The kernel seals it, so
//! its bytes cannot change any more, and only the copy is mapped. Nothing touches the server after that but the next
//! opening by name, which finds out whether the file was replaced.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;

use super::error::{CopyError, NoAnswer};
use super::room;
use crate::aside::{Aside, Errand, Subject};
use crate::tensor::{FileIdentity, MappedFile};

/// Bytes of one read. A server that needs longer than the patience of 10 s for them counts as silent: 26 KB/s.
const PIECE_BYTES: usize = 256 << 10;

/// Time between two lines of the log about one copy.
const LOG_PAUSE: Duration = Duration::from_secs(10);

/// A file to copy.
pub(super) struct Original {
    pub file: File,
    /// Type of its file system, as the kernel names it.
    pub file_system: String,
    pub identity: FileIdentity,
    /// The model, for messages and the log.
    pub model: String,
}

/// Bytes that copies under way still need.
#[derive(Debug, Default)]
pub(super) struct Outstanding(Arc<AtomicU64>);

/// A copy's part of [`Outstanding`]; it shrinks as bytes arrive.
struct Share {
    all: Arc<AtomicU64>,
    left: u64,
}

impl Share {
    fn arrived(&mut self, bytes: u64) {
        let bytes = bytes.min(self.left);
        self.left -= bytes;
        self.all.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.arrived(self.left);
    }
}

impl Outstanding {
    /// Sets `bytes` aside, if half of what is available and not set aside has room for them.
    fn take(&self, original: &Original, available: Option<u64>) -> Result<Share, CopyError> {
        let bytes = original.identity.size;
        let free = |set_aside: u64| available.unwrap_or(u64::MAX).saturating_sub(set_aside);
        let fits = |set_aside: u64| (bytes <= free(set_aside) / 2).then(|| set_aside.saturating_add(bytes));
        let taken = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        let file_system = original.file_system.clone();
        taken
            .map(|_| Share { all: Arc::clone(&self.0), left: bytes })
            .map_err(|set_aside| CopyError::NoRoom { file_system, bytes, available_bytes: free(set_aside) })
    }
}

/// Copies a file into sealed memory. Blocks as long as bytes come.
///
/// # Errors
/// [`CopyError`].
pub(super) fn into_memory(
    aside: &Arc<Aside>,
    outstanding: &Outstanding,
    gate: &str,
    original: Original,
) -> Result<File, CopyError> {
    let share = match outstanding.take(&original, room::available()) {
        Ok(share) => share,
        Err(error) => {
            aside.let_go(String::new(), original);
            return Err(error);
        }
    };
    let (bytes, file_system, begun) = (original.identity.size, original.file_system.clone(), Instant::now());
    let (model, copied) = (original.model.clone(), Arc::new(AtomicU64::new(0)));
    let subject =
        Subject { what: "reading the file", name: gate.to_owned(), device: Some(original.identity.dev) };
    let counter = Arc::clone(&copied);
    let work = move |errand: &Errand<Result<File, CopyError>>| {
        let result = read_whole(errand, &original, share, &counter);
        errand.answer(result); // before the file is closed, which asks the server too
    };
    let result = aside.run(subject, work).map_err(|why| NoAnswer {
        file_system: file_system.clone(),
        why,
        arrived: Some((copied.load(Ordering::Relaxed), bytes)),
    });
    let file = result??;
    let seconds = begun.elapsed().as_secs_f64();
    tracing::info!(name: "copied", model, file_system, bytes, seconds, "the model is served from a copy in memory, because its file system's server may hang");
    Ok(file)
}

/// Reads the whole file into memory and seals it.
fn read_whole(
    errand: &Errand<Result<File, CopyError>>,
    original: &Original,
    mut share: Share,
    counter: &AtomicU64,
) -> Result<File, CopyError> {
    let bytes = original.identity.size;
    let mut copied = 0;
    let failed = |what, copied, errno: Errno| {
        let file_system = original.file_system.clone();
        CopyError::Os { file_system, what, copied, bytes, source: errno.into() }
    };
    let memory = memory_file().map_err(|errno| failed("memfd_create", copied, errno))?;
    let mut piece = vec![0; PIECE_BYTES];
    let mut told = Instant::now();
    while copied < bytes {
        let read = match rustix::io::pread(&original.file, &mut piece, copied) {
            Ok(0) => return Err(CopyError::Changed { bytes }),
            Ok(read) => read,
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(failed("reading", copied, errno)),
        };
        let mut rest = piece.get(..read).unwrap_or_default();
        while !rest.is_empty() {
            match rustix::io::pwrite(&memory, rest, copied) {
                Ok(written) => {
                    rest = rest.get(written..).unwrap_or_default();
                    copied += written as u64;
                    share.arrived(written as u64);
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(failed("writing to memory", copied, errno)),
            }
        }
        counter.store(copied, Ordering::Relaxed);
        if !errand.goes_on() {
            return Err(CopyError::Changed { bytes }); // nobody waits for it any more
        }
        if told.elapsed() >= LOG_PAUSE {
            told = Instant::now();
            let Original { model, file_system, .. } = original;
            tracing::info!(model, file_system, copied, bytes, "copying the model into memory");
        }
    }
    let now = MappedFile::inspect(&original.file);
    if !now.is_ok_and(|now| (now.size, now.mtime_ns) == (bytes, original.identity.mtime_ns)) {
        return Err(CopyError::Changed { bytes });
    }
    sealed(&memory).map_err(|errno| failed("sealing memory", copied, errno))
}

/// A file in memory, without a name and not to be executed, which kernels before 6.3 cannot say.
fn memory_file() -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match rustix::fs::memfd_create("rocmforge-model", flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => rustix::fs::memfd_create("rocmforge-model", flags),
        made => made,
    }
}

/// The same memory, read only for good.
fn sealed(memory: &OwnedFd) -> Result<File, Errno> {
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(memory.as_fd(), seals)?;
    // A descriptor for reading only, as the mapping wants it.
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map(File::from)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::aside::Limits;

    fn original(bytes: &[u8]) -> Original {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let file = File::open(file.path()).unwrap();
        let identity = MappedFile::inspect(&file).unwrap();
        Original { file, file_system: "nfs4".into(), identity, model: "m".into() }
    }

    #[test]
    fn a_copy_has_the_files_bytes_and_cannot_change() {
        let bytes: Vec<u8> = (0..PIECE_BYTES * 2 + 77).map(|at| (at * 31 + at / 251) as u8).collect();
        let outstanding = Outstanding::default();
        let copy = into_memory(&Aside::new(Limits::default()), &outstanding, "m", original(&bytes)).unwrap();
        let mapped = MappedFile::map(copy.try_clone().unwrap()).unwrap();
        assert!(mapped.bytes(0..mapped.len()).unwrap() == bytes);
        mapped.check_unchanged().unwrap();
        assert_eq!(outstanding.0.load(Ordering::Relaxed), 0);
        let path = format!("/proc/self/fd/{}", copy.as_raw_fd());
        let writable = File::options().write(true).open(path);
        let refused = writable.and_then(|mut file| file.write_all(b"x").and_then(|()| file.set_len(1)));
        assert!(refused.is_err(), "the copy is sealed");
    }

    #[test]
    fn a_file_that_lost_bytes_is_not_served() {
        let mut cut = original(b"12345678");
        cut.identity.size = 9;
        let result = into_memory(&Aside::new(Limits::default()), &Outstanding::default(), "m", cut);
        assert!(matches!(result, Err(CopyError::Changed { bytes: 9 })), "{result:?}");
    }

    #[test]
    fn copies_take_at_most_half_of_what_is_free_and_know_of_each_other() {
        let outstanding = Outstanding::default();
        let file = original(&[1; 300]);
        let first = outstanding.take(&file, Some(900)).ok().unwrap();
        let refused = outstanding.take(&file, Some(899)).err().unwrap();
        assert!(matches!(refused, CopyError::NoRoom { bytes: 300, available_bytes: 599, .. }), "{refused}");
        drop(first);
        assert!(outstanding.take(&file, Some(600)).is_ok() && outstanding.take(&file, Some(599)).is_err());
    }
}
