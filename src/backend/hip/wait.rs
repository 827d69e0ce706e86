//! Waiting for the device, with an end to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::{Device, Event, HipError, Stream};
use crate::backend::BackendError;

/// The device is asked without a pause for this long: a decode step of a large model takes a few milliseconds, and a thread
/// that sleeps wakes up late.
const SPIN: Duration = Duration::from_millis(5);

/// Then as often as this.
const PAUSE: Duration = Duration::from_micros(100);

/// Notices when nothing arrives any more.
#[derive(Debug, Default)]
pub struct Standstill {
    /// Bytes that had arrived, and since when no more did; none before the first look.
    seen: Option<(u64, Instant)>,
}

impl Standstill {
    /// For how long `bytes` have been all that arrived.
    pub fn since(&mut self, bytes: u64, now: Instant) -> Duration {
        let seen = self.seen.filter(|(seen, _)| *seen == bytes);
        let (_, since) = *self.seen.insert(seen.unwrap_or((bytes, now)));
        now.saturating_duration_since(since)
    }
}

/// Knows whether work is under way, and how long to wait for it.
pub struct Waiter {
    done: Event,
    busy: bool,
    patience: Duration,
    /// Moves while it waits.
    heartbeat: Arc<AtomicU64>,
}

impl Waiter {
    /// A waiter that gives the device up after `patience`.
    ///
    /// # Errors
    /// [`HipError`].
    pub fn new(device: &Device, patience: Duration) -> Result<Self, HipError> {
        Ok(Self { done: device.event(false)?, busy: false, patience, heartbeat: Arc::default() })
    }

    /// A count to move from now on.
    pub fn set_heartbeat(&mut self, heartbeat: Arc<AtomicU64>) {
        self.heartbeat = heartbeat;
    }

    /// A wait goes on.
    pub fn beat(&self) {
        self.heartbeat.fetch_add(1, Ordering::Relaxed);
    }

    /// Work is under way from now on.
    pub fn set_busy(&mut self) {
        self.busy = true;
    }

    /// Waits until all work on `stream` is done.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`] also when the device does not answer in time; [`BackendError::Device`].
    pub fn settle(&mut self, device: &Device, stream: &Stream) -> Result<(), BackendError> {
        if !self.busy {
            return Ok(());
        }
        self.busy = false; // whatever comes of it, nothing more is waited for
        stream.record(&self.done)?;
        let started = Instant::now();
        while !self.done.is_done()? {
            let waited = started.elapsed();
            if waited > self.patience {
                return Err(self.late(device, "a step"));
            }
            if waited > SPIN {
                self.beat();
                std::thread::sleep(PAUSE);
            } else {
                std::hint::spin_loop();
            }
        }
        Ok(())
    }

    /// The device did not finish `what` in time, and counts as lost.
    pub fn late(&self, device: &Device, what: &'static str) -> BackendError {
        device.lose(what, &format!("no answer for {} s", self.patience.as_secs_f32())).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_standstill_begins_anew_with_every_byte() {
        let (mut standstill, begin) = (Standstill::default(), Instant::now());
        let mut since =
            |bytes, second| standstill.since(bytes, begin + Duration::from_secs(second)).as_secs();
        assert_eq!((since(5, 10), since(5, 13), since(5, 17)), (0, 3, 7));
        assert_eq!((since(6, 18), since(6, 19)), (0, 1), "something came");
    }
}
