//! Gives freed memory back to the system soon after much of it was freed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

use super::allocator;

/// Shortest time between two trims. Each takes some milliseconds, in which other threads' allocations wait.
const PAUSE: Duration = Duration::from_secs(2);

/// Bytes by which free blocks may grow before a trim. Requests free their working memory uncounted: after floods of three
/// users, 1,024 queued requests each, the heap kept 70 to 110 MiB.
const FREE_BYTES: i64 = 16 << 20;

/// Memory of the process in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    /// Free blocks of the heap, those included whose pages the system has back.
    free: i64,
    /// Anonymous memory that is no block in use. It shows blocks that were used and freed again between two looks; the count of
    /// free blocks does not. After 256 compiled grammars the heap kept 106 MiB so.
    unused: i64,
}

/// When to trim: the fewest bytes of each kind since the last trim.
#[derive(Debug, Default)]
struct Trims(Counts);

impl Trims {
    fn is_due(&mut self, now: Counts) -> bool {
        let fewest = &mut self.0;
        (fewest.free, fewest.unused) = (fewest.free.min(now.free), fewest.unused.min(now.unused));
        (now.free - fewest.free).max(now.unused - fewest.unused) > FREE_BYTES
    }

    fn done(&mut self, now: Counts) {
        self.0 = now;
    }
}

/// Reads [`Counts`].
#[derive(Debug)]
struct Reader(Option<File>);

impl Reader {
    fn new() -> Self {
        Self(File::open("/proc/self/statm").ok())
    }

    fn read(&self) -> Counts {
        let (free, used) = allocator::bytes();
        let anonymous = self.anonymous().unwrap_or(used);
        let signed = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
        Counts { free: signed(free), unused: signed(anonymous).saturating_sub(signed(used)) }
    }

    /// Resident bytes without files: the second number less the third, in pages. Each read at offset 0 is a new report.
    fn anonymous(&self) -> Option<u64> {
        let mut text = [0; 256];
        let bytes = self.0.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = str::from_utf8(text.get(..bytes)?).ok()?;
        let mut pages = text.split_ascii_whitespace().skip(1).map(str::parse::<u64>);
        let (resident, of_files) = (pages.next()?.ok()?, pages.next()?.ok()?);
        resident.checked_sub(of_files)?.checked_mul(rustix::param::page_size() as u64)
    }
}

/// The trimmer, a thread that ends when this is dropped.
///
/// Without trims, the heap once kept 3.4 GB for minutes after 4,000 clients with frames of 1 MiB had left. Small blocks
/// that lived on lay between the freed ones.
///
/// A thread of its own looks at the free blocks, which takes longer than a runtime thread may. Looks every 2 s from threads
/// for blocking work would keep one of those alive for ever.
#[derive(Debug)]
pub(super) struct Trimmer {
    _stop: Sender<()>,
}

impl Trimmer {
    /// Trims the heap whenever unused memory grew by more than [`FREE_BYTES`].
    ///
    /// # Errors
    /// The operating system has no thread left.
    pub(super) fn start() -> std::io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        // Opened before clients come: a descriptor that the thread opens later would look like one that a client left behind.
        let reader = Reader::new();
        let run = move || {
            let mut trims = Trims::default();
            trims.done(reader.read());
            while stopped.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
                if trims.is_due(reader.read()) {
                    allocator::trim();
                    trims.done(reader.read());
                }
            }
        };
        std::thread::Builder::new().name("trim".into()).spawn(run)?;
        Ok(Self { _stop: stop })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_trim_is_due_after_much_was_freed_and_not_again_for_what_it_left() {
        let mut trims = Trims::default();
        let mut is_due =
            |free, unused| trims.is_due(Counts { free: free * MIB as i64, unused: unused * MIB as i64 });
        assert!(!is_due(16, 16), "no more than the heap may keep");
        assert!(is_due(17, 0) && is_due(0, 17));
        trims.done(Counts { free: 100 << 20, unused: 10 << 20 });
        let mut is_due =
            |free, unused| trims.is_due(Counts { free: free * MIB as i64, unused: unused * MIB as i64 });
        assert!(!is_due(110, 10) && is_due(117, 10));
        assert!(is_due(100, 27), "blocks were used and freed between two looks");
        assert!(!is_due(20, 10), "blocks are in use again");
        assert!(is_due(37, 10), "and free again");
        assert!(!is_due(20, -50), "a large block is not touched yet");
    }

    #[test]
    fn blocks_that_are_freed_are_counted_as_free_and_as_unused() {
        let reader = Reader::new();
        // More than other tests of this process take meanwhile; every second one lives on, so that none of the freed ones meet.
        let blocks: Vec<Vec<u8>> = (0..8192).map(|_| vec![1; 32 << 10]).collect();
        let held = reader.read();
        let kept: Vec<Vec<u8>> = blocks.into_iter().step_by(2).collect();
        let after = reader.read();
        let grown = (after.free - held.free).min(after.unused - held.unused);
        assert!(!cfg!(target_env = "gnu") || grown >= 64 << 20, "{held:?}, {after:?}");
        drop(kept);
    }
}
