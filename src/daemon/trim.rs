//! Gives freed memory back to the system soon after much of it was freed.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

use super::allocator;

/// Shortest time between two trims. Each takes some milliseconds, in which other threads' allocations wait.
const PAUSE: Duration = Duration::from_secs(2);

/// Freed bytes that are worth a trim. The heap may keep as many.
const FREED_BYTES: u64 = 32 << 20;

/// Bytes by which the heap's free blocks may grow before a trim. Requests free their working memory uncounted: after floods
/// of three users, 1,024 queued requests each, the heap kept 70 to 110 MiB.
const FREE_BYTES: u64 = 16 << 20;

/// When to trim.
#[derive(Debug, Default)]
struct Trims {
    /// `freed` at the last trim.
    freed: u64,
    /// Bytes of free blocks since the last trim, at their fewest. Those that a trim gave back count as free, too.
    free: u64,
}

impl Trims {
    /// Whether so many freed bytes, counted modulo 2^64, or so many free ones are worth a trim.
    fn is_due(&mut self, freed: u64, free: u64) -> bool {
        self.free = self.free.min(free);
        freed.wrapping_sub(self.freed) > FREED_BYTES || free - self.free > FREE_BYTES
    }

    fn done(&mut self, freed: u64, free: u64) {
        *self = Self { freed, free };
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
    /// Trims the heap whenever `freed` grew by more than [`FREED_BYTES`], or its free blocks by [`FREE_BYTES`]. `freed` counts
    /// bytes modulo 2^64.
    ///
    /// # Errors
    /// The operating system has no thread left.
    pub(super) fn start(freed: impl Fn() -> u64 + Send + 'static) -> std::io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let run = move || {
            let mut trims = Trims { freed: freed(), free: 0 };
            while stopped.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
                let now = freed();
                if trims.is_due(now, allocator::free_bytes()) {
                    allocator::trim();
                    trims.done(now, allocator::free_bytes());
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
        assert!(!trims.is_due(32 * MIB, 16 * MIB), "no more than the heap may keep");
        assert!(trims.is_due(33 * MIB, 0) && trims.is_due(0, 17 * MIB));
        trims.done(33 * MIB, 100 * MIB);
        assert!(!trims.is_due(40 * MIB, 110 * MIB) && trims.is_due(40 * MIB, 117 * MIB));
        assert!(!trims.is_due(40 * MIB, 20 * MIB), "blocks are in use again");
        assert!(trims.is_due(40 * MIB, 37 * MIB), "and free again");
        trims.done(u64::MAX - MIB, 0);
        assert!(!trims.is_due(MIB, 0) && trims.is_due(32 * MIB, 0), "the count starts again at 2^64");
    }

    #[test]
    fn the_allocator_knows_its_free_blocks() {
        // More than other tests of this process take meanwhile; every second one lives on, so that none of the freed ones meet.
        let blocks: Vec<Vec<u8>> = (0..8192).map(|_| vec![1; 32 << 10]).collect();
        let before = allocator::free_bytes();
        let kept: Vec<Vec<u8>> = blocks.into_iter().step_by(2).collect();
        let free = allocator::free_bytes();
        assert!(!cfg!(target_env = "gnu") || free >= before + 64 * MIB, "{before} before, {free} after");
        drop(kept);
    }
}
