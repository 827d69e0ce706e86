//! Gives freed memory back to the system soon after much of it was freed.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

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

/// Trims the heap whenever `freed` grew by more than [`FREED_BYTES`], or its free blocks by [`FREE_BYTES`], until `stop`. `freed`
/// counts bytes modulo 2^64.
///
/// Without trims, the heap once kept 3.4 GB for minutes after 4,000 clients with frames of 1 MiB had left. Small blocks
/// that lived on lay between the freed ones.
pub(super) async fn run(freed: impl Fn() -> u64 + Send, stop: CancellationToken) {
    let mut trims = Trims { freed: freed(), free: 0 };
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(PAUSE) => {}
        }
        let now = freed();
        let look = move || {
            if trims.is_due(now, allocator::free_bytes()) {
                allocator::trim();
                trims.done(now, allocator::free_bytes());
            }
            trims
        };
        // Should the thread fail, the next round tries again.
        trims = tokio::task::spawn_blocking(look).await.unwrap_or_default();
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
        let before = allocator::free_bytes();
        let blocks: Vec<Vec<u8>> = (0..2048).map(|_| vec![1; 32 << 10]).collect();
        // Every second one lives on, so that none of the freed ones meet.
        let kept: Vec<Vec<u8>> = blocks.into_iter().step_by(2).collect();
        let free = allocator::free_bytes();
        assert!(!cfg!(target_env = "gnu") || free >= before + 16 * MIB, "{before} before, {free} after");
        drop(kept);
    }
}
