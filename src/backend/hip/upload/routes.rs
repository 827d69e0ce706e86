//! Which way bytes take to the device, found out on the tensors that have to go there anyway.
//!
//! A way is a path and a number of staging threads. Each way that may be taken has its turn for [`TRIAL_BYTES`] of real
//! loads; then of those within a tenth of the fastest one stays: the ring before registered pages before plain copies, and
//! fewer threads before more, since they are taken from whoever else computes. What is measured is the time in which a tensor
//! was on its way, so that pauses between loads do not count; nor do the first [`TRIAL_BYTES`], which meet cold pages and
//! threads that start (13 GB/s where the same way then took 40, on a machine with an H200).
//!
//! The ring comes first because its threads read files themselves: one that was cut short is an error of theirs. Registered
//! pages are in the driver's hands. It refuses those that the file has lost, and those it has pinned stay as they are; that
//! holds where it pins. A driver that follows the page table instead, as AMD's can, may stop the device when pages vanish: so
//! registered pages are taken only where the configuration names them. (On an H200 they were no faster either: 8 to 24 GB/s
//! where the ring had 31 to 46.)
//!
//! Below [`LINK_RATE`] it was the file that was read and not the link that was used, and all ways look the same: nothing is
//! learnt, the first way goes on, and the rest have their turns again later.

use std::time::Duration;

use super::UploadPath;
use crate::backend::UploadRate;

/// Bytes that a way brings before it is judged: 1 ms of a fast link, and some five tensors of a large model.
const TRIAL_BYTES: u64 = 48 << 20;

/// Slower than any link of a GPU that such a way could fill, in bytes a second.
const LINK_RATE: f64 = 5e9;

/// Bytes after which ways are tried again where nothing was learnt.
const AGAIN_BYTES: u64 = 2 << 30;

/// Shorter tensors are all latency: they go through pinned buffers and tell nothing.
pub const JUDGED_BYTES: u64 = 1 << 20;

/// Ways at most.
const WAYS: usize = 4;

/// A path, and how many threads carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    pub path: UploadPath,
    pub threads: usize,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    way: Way,
    /// Of its loads since it is judged, without the first and the short ones.
    bytes: u64,
    busy: Duration,
    refused: bool,
}

impl Candidate {
    fn rate(&self) -> f64 {
        let seconds = self.busy.as_secs_f64();
        if seconds > 0.0 { self.bytes as f64 / seconds } else { 0.0 }
    }

    fn was_tried(&self) -> bool {
        self.bytes >= TRIAL_BYTES
    }
}

/// The ways of one device. The first candidate is what is taken until more is known.
#[derive(Debug)]
pub struct Routes {
    candidates: Vec<Candidate>,
    current: usize,
    settled: bool,
    /// Bytes that came before anything was judged.
    first: u64,
    /// Bytes of all ways when nothing was learnt the last time.
    unlearnt_from: Option<u64>,
}

impl Routes {
    /// The ways to try for `path` with at most `threads` threads.
    pub fn new(path: UploadPath, threads: usize) -> Self {
        let (all, few) = (threads.max(1), (threads / 2).max(1));
        let ways = match path {
            UploadPath::Auto => {
                let mut ways = vec![Way { path: UploadPath::Ring, threads: all }];
                if few < all {
                    ways.push(Way { path: UploadPath::Ring, threads: few });
                }
                ways.push(Way { path: UploadPath::Copy, threads: few });
                ways
            }
            UploadPath::Registered => {
                vec![Way { path, threads: all.min(2) }, Way { path: UploadPath::Ring, threads: all }]
            }
            UploadPath::Ring => vec![Way { path, threads: all }],
            UploadPath::Copy => vec![Way { path, threads: few }],
        };
        let new = |way| Candidate { way, bytes: 0, busy: Duration::ZERO, refused: false };
        let candidates = ways.into_iter().take(WAYS).map(new).collect();
        Self { candidates, current: 0, settled: path != UploadPath::Auto, first: 0, unlearnt_from: None }
    }

    /// The way to take now.
    pub fn current(&self) -> Way {
        let first = Way { path: UploadPath::Copy, threads: 1 };
        self.candidates.get(self.current).map_or(first, |candidate| candidate.way)
    }

    /// The way for a tensor too short to be judged.
    pub fn short(&self) -> Way {
        let ring = |c: &&Candidate| c.way.path == UploadPath::Ring && !c.refused;
        self.candidates.iter().find(ring).map_or_else(|| self.current(), |candidate| candidate.way)
    }

    /// A tensor of `bytes` went this way; for `busy` it was the next to arrive.
    pub fn arrived(&mut self, way: Way, bytes: u64, busy: Duration) {
        if bytes < JUDGED_BYTES {
            return;
        }
        if !self.settled && self.first < TRIAL_BYTES {
            self.first += bytes;
            return;
        }
        let Some(candidate) = self.candidates.iter_mut().find(|c| c.way == way) else { return };
        candidate.bytes += bytes;
        candidate.busy += busy;
        if self.settled {
            return;
        }
        match self.unlearnt_from {
            Some(from) if self.bytes() < from + AGAIN_BYTES => {}
            Some(_) => self.try_again(),
            None => self.next_turn(),
        }
    }

    /// A path cannot be taken here: nothing goes that way any more.
    pub fn refuse(&mut self, path: UploadPath) {
        for candidate in self.candidates.iter_mut().filter(|c| c.way.path == path) {
            candidate.refused = true;
        }
        let left = self.candidates.iter().position(|c| !c.refused);
        if self.candidates.get(self.current).is_some_and(|c| c.refused) {
            match left {
                Some(left) => self.current = left,
                // The last resort, which needs nothing of the driver that a copy does not.
                None => {
                    let way = Way { path: UploadPath::Copy, threads: 1 };
                    let (bytes, busy) = (0, Duration::ZERO);
                    self.current = self.candidates.len();
                    self.candidates.push(Candidate { way, bytes, busy, refused: false });
                    self.settled = true;
                }
            }
        }
        if !self.settled && self.unlearnt_from.is_none() {
            self.next_turn();
        }
    }

    fn bytes(&self) -> u64 {
        self.candidates.iter().map(|c| c.bytes).sum()
    }

    fn next_turn(&mut self) {
        let untried = self.candidates.iter().position(|c| !c.refused && !c.was_tried());
        match untried {
            Some(next) => self.current = next,
            None => self.judge(),
        }
    }

    fn judge(&mut self) {
        let able = || self.candidates.iter().enumerate().filter(|(_, c)| !c.refused);
        let best = able().map(|(_, c)| c.rate()).fold(0.0, f64::max);
        if best < LINK_RATE {
            self.current = able().map(|(index, _)| index).next().unwrap_or(0);
            self.unlearnt_from = Some(self.bytes());
            return;
        }
        // Fewer threads first within a path; the paths in their order.
        let order = [UploadPath::Ring, UploadPath::Registered, UploadPath::Copy];
        let place = |c: &Candidate| (order.iter().position(|path| *path == c.way.path), c.way.threads);
        let good = able().filter(|(_, c)| c.rate() >= 0.9 * best);
        let Some((chosen, _)) = good.min_by_key(|(_, c)| place(c)) else { return };
        (self.current, self.settled) = (chosen, true);
        let (way, rate) = (self.current(), best / 1e9);
        tracing::info!(
            path = way.path.name(),
            threads = way.threads,
            rate,
            "weights go this way from now on"
        );
    }

    /// What was measured while the file was the slower part says nothing of the link.
    fn try_again(&mut self) {
        self.unlearnt_from = None;
        for candidate in &mut self.candidates {
            (candidate.bytes, candidate.busy) = (0, Duration::ZERO);
        }
        self.current = self.candidates.iter().position(|c| !c.refused).unwrap_or(0);
    }

    /// What is known of each way.
    pub fn rates(&self) -> [UploadRate; WAYS] {
        let mut rates = [UploadRate::default(); WAYS];
        for (index, (rate, candidate)) in rates.iter_mut().zip(&self.candidates).enumerate() {
            *rate = UploadRate {
                path: candidate.way.path.name(),
                threads: u16::try_from(candidate.way.threads).unwrap_or(u16::MAX),
                bytes: candidate.bytes,
                busy: candidate.busy,
                in_use: index == self.current,
                refused: candidate.refused,
            };
        }
        rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Brings tensors of 24 MiB until nothing is tried any more, at the rates that `rate` says in GB/s.
    fn settle(routes: &mut Routes, rate: impl Fn(Way) -> f64) -> Vec<Way> {
        let mut taken = Vec::new();
        for _ in 0..24 {
            let way = routes.current();
            if taken.last() != Some(&way) {
                taken.push(way);
            }
            let bytes = 24 << 20;
            routes.arrived(way, bytes, Duration::from_secs_f64(bytes as f64 / rate(way) / 1e9));
        }
        taken
    }

    fn ring(threads: usize) -> Way {
        Way { path: UploadPath::Ring, threads }
    }

    #[test]
    fn every_way_has_its_turn_and_the_ring_stays_unless_it_is_slower() {
        let mut routes = Routes::new(UploadPath::Auto, 8);
        let taken = settle(&mut routes, |way| match way.path {
            UploadPath::Copy => 6.0,
            _ => 50.0 * way.threads as f64 / 8.0,
        });
        assert_eq!(taken.len(), 4, "{taken:?}");
        assert_eq!(routes.current(), ring(8));
        let rates = routes.rates();
        assert!(rates.iter().all(|rate| rate.path.is_empty() || rate.bytes >= TRIAL_BYTES));
        assert_eq!(rates.iter().filter(|rate| rate.in_use).count(), 1);
        assert!((rates[0].bytes_per_second() / 1e9 - 50.0).abs() < 0.1);

        let mut routes = Routes::new(UploadPath::Auto, 8);
        settle(&mut routes, |way| if way.path == UploadPath::Copy { 6.0 } else { 26.0 });
        assert_eq!(routes.current(), ring(4), "the link is full with half of the threads");

        let mut routes = Routes::new(UploadPath::Auto, 2);
        settle(&mut routes, |way| if way.path == UploadPath::Copy { 48.0 } else { 9.0 });
        assert_eq!(routes.current().path, UploadPath::Copy);
    }

    #[test]
    fn a_cold_start_is_not_held_against_the_first_way() {
        let mut routes = Routes::new(UploadPath::Auto, 8);
        for _ in 0..2 {
            routes.arrived(ring(8), 24 << 20, Duration::from_millis(10));
        }
        assert_eq!(routes.rates()[0].bytes, 0);
        settle(&mut routes, |way| 5.5 * way.threads as f64);
        assert_eq!(routes.current(), ring(8));
    }

    #[test]
    fn a_slow_file_teaches_nothing_and_is_asked_again_later() {
        let mut routes = Routes::new(UploadPath::Auto, 8);
        settle(&mut routes, |_| 2.0);
        assert_eq!(routes.current(), ring(8));
        routes.arrived(ring(8), AGAIN_BYTES, Duration::from_secs(1));
        settle(&mut routes, |way| if way.path == UploadPath::Copy { 60.0 } else { 20.0 });
        assert_eq!(routes.current().path, UploadPath::Copy);
    }

    #[test]
    fn what_was_refused_is_not_taken_again() {
        let mut routes = Routes::new(UploadPath::Registered, 4);
        assert_eq!(routes.current().path, UploadPath::Registered);
        routes.refuse(UploadPath::Registered);
        assert_eq!(routes.current(), ring(4));
        routes.refuse(UploadPath::Ring);
        assert_eq!((routes.current().path, routes.short().path), (UploadPath::Copy, UploadPath::Copy));
        assert_eq!(routes.rates().iter().filter(|rate| rate.refused).count(), 2);

        let mut routes = Routes::new(UploadPath::Auto, 4);
        routes.refuse(UploadPath::Copy);
        let taken = settle(&mut routes, |_| 20.0);
        assert!(taken.iter().all(|way| way.path == UploadPath::Ring));
        assert_eq!(routes.current(), ring(2));
    }

    #[test]
    fn a_path_that_was_asked_for_stays_and_short_tensors_tell_nothing() {
        let mut routes = Routes::new(UploadPath::Copy, 4);
        let taken = settle(&mut routes, |_| 1.0);
        assert_eq!(taken.len(), 1);
        routes.arrived(taken[0], JUDGED_BYTES - 1, Duration::from_secs(9));
        assert_eq!(routes.rates()[0].bytes, 24 * (24 << 20));
    }
}
