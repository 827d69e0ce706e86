//! Choice of the way that bytes take to the device.
//!
//! A way is a path and a number of staging threads. Unless the configuration names a path, it is the ring. Its threads
//! read files themselves, so a truncated file is an error in a thread. Some devices, such as those that share the
//! host's memory, may copy ordinary memory faster than pinned memory. A trial finds that out when the device opens.
//! Trials on the first loads were misleading, because overlapping ways look faster than they are. On an H200, plain
//! copies of 10 GB/s were credited with the ring's 44.
//!
//! The driver controls registered pages. It refuses pages that the file has lost, and pinned pages keep their content;
//! that holds only where it pins. A driver that follows the page table instead, as AMD's can, may stop the device when
//! pages vanish. So registered pages are used only when the configuration names them. They were no faster on an H200
//! either: 14 to 16 GB/s.
//!
//! A way's reported time counts only while its tensors were the next to arrive, so pauses between loads do not count.

use std::time::Duration;

use super::UploadPath;
use crate::backend::UploadRate;

/// Copies of ordinary memory must be this much faster than copies of pinned memory to replace the ring.
const PLAIN_AHEAD: f64 = 1.25;

/// Shorter tensors are dominated by latency. They go through pinned buffers and are not counted in the rates.
pub const LONG_BYTES: u64 = 1 << 20;

/// Most ways per device.
const WAYS: usize = 4;

/// A path and its number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    pub path: UploadPath,
    pub threads: usize,
}

/// The last resort: it needs only plain copies from the driver.
const LAST: Way = Way { path: UploadPath::Copy, threads: 1 };

/// Measured rate of copying one buffer, in bytes per second, from pinned and from ordinary memory.
#[derive(Clone, Copy, Debug)]
pub struct CopyRates {
    pub pinned: f64,
    pub plain: f64,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    way: Way,
    /// Bytes of its loads, without short ones.
    bytes: u64,
    busy: Duration,
    refused: bool,
}

/// The ways of one device, in order of preference.
#[derive(Debug)]
pub struct Routes {
    candidates: Vec<Candidate>,
}

impl Routes {
    /// The ways for `path` with at most `threads` threads. `rates` holds the trial's result, if there was one.
    pub fn new(path: UploadPath, threads: usize, rates: Option<CopyRates>) -> Self {
        let all = threads.max(1);
        let ring = Way { path: UploadPath::Ring, threads: all };
        // The driver's own staging occupies one core; more threads only read the next pages of the file.
        let copy = Way { path: UploadPath::Copy, threads: all.min(4) };
        let ways = match path {
            UploadPath::Auto if rates.is_some_and(|rates| rates.plain > PLAIN_AHEAD * rates.pinned) => {
                vec![copy, ring]
            }
            UploadPath::Auto => vec![ring, copy],
            UploadPath::Registered => vec![Way { path, threads: all.min(2) }, ring],
            UploadPath::Ring => vec![ring],
            UploadPath::Copy => vec![copy],
        };
        let new = |way| Candidate { way, bytes: 0, busy: Duration::ZERO, refused: false };
        Self { candidates: ways.into_iter().map(new).collect() }
    }

    fn open(&self) -> impl Iterator<Item = Way> {
        self.candidates.iter().filter(|candidate| !candidate.refused).map(|candidate| candidate.way)
    }

    /// The way to use now.
    pub fn current(&self) -> Way {
        self.open().next().unwrap_or(LAST)
    }

    /// The way for a tensor of less than [`LONG_BYTES`].
    pub fn short(&self) -> Way {
        self.open().find(|way| way.path == UploadPath::Ring).unwrap_or_else(|| self.current())
    }

    /// Counts a tensor of `bytes` that took this way and was the next to arrive for `busy`.
    pub fn arrived(&mut self, way: Way, bytes: u64, busy: Duration) {
        let candidate = self.candidates.iter_mut().find(|candidate| candidate.way == way);
        if let Some(candidate) = candidate.filter(|_| bytes >= LONG_BYTES) {
            candidate.bytes += bytes;
            candidate.busy += busy;
        }
    }

    /// Disables a path that does not work on this device.
    pub fn refuse(&mut self, path: UploadPath) {
        for candidate in self.candidates.iter_mut().filter(|candidate| candidate.way.path == path) {
            candidate.refused = true;
        }
        if self.open().next().is_none() && self.candidates.len() < WAYS {
            self.candidates.push(Candidate { way: LAST, bytes: 0, busy: Duration::ZERO, refused: false });
        }
    }

    /// Measurements of each way.
    pub fn rates(&self) -> [UploadRate; WAYS] {
        let (mut rates, current) = ([UploadRate::default(); WAYS], self.current());
        for (rate, candidate) in rates.iter_mut().zip(&self.candidates) {
            *rate = UploadRate {
                path: candidate.way.path.name(),
                threads: u16::try_from(candidate.way.threads).unwrap_or(u16::MAX),
                bytes: candidate.bytes,
                busy: candidate.busy,
                in_use: candidate.way == current && !candidate.refused,
                refused: candidate.refused,
            };
        }
        rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(threads: usize) -> Way {
        Way { path: UploadPath::Ring, threads }
    }

    #[test]
    fn the_ring_is_taken_unless_ordinary_memory_is_copied_faster() {
        let current =
            |pinned, plain| Routes::new(UploadPath::Auto, 8, Some(CopyRates { pinned, plain })).current();
        assert_eq!(current(55e9, 9e9), ring(8));
        assert_eq!(current(10e9, 12e9), ring(8), "not by enough");
        assert_eq!(current(10e9, 13e9).path, UploadPath::Copy);
        assert_eq!(Routes::new(UploadPath::Auto, 3, None).current(), ring(3));
    }

    #[test]
    fn a_refused_route_is_not_taken_again() {
        let mut routes = Routes::new(UploadPath::Registered, 4, None);
        assert_eq!((routes.current().path, routes.short()), (UploadPath::Registered, ring(4)));
        routes.refuse(UploadPath::Registered);
        assert_eq!(routes.current(), ring(4));
        routes.refuse(UploadPath::Ring);
        assert_eq!((routes.current().path, routes.short().path), (UploadPath::Copy, UploadPath::Copy));
        let rates = routes.rates();
        assert_eq!(rates.iter().filter(|rate| rate.refused).count(), 2);
        assert_eq!(rates.iter().filter(|rate| rate.in_use).count(), 1);
    }

    #[test]
    fn a_rate_is_of_long_tensors_and_the_time_in_which_they_were_next() {
        let mut routes = Routes::new(UploadPath::Auto, 8, None);
        routes.arrived(ring(8), LONG_BYTES - 1, Duration::from_secs(9));
        assert_eq!(routes.rates()[0].bytes, 0);
        routes.arrived(ring(8), 50 << 20, Duration::from_millis(1));
        let rate = routes.rates()[0];
        assert!(rate.in_use && (rate.bytes_per_second() - 1000.0 * (50 << 20) as f64).abs() < 1.0);
    }
}
