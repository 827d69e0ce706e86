//! Waiting for the device, with a timeout.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::backend::BackendError;
use crate::backend::hip::{Device, Event, HipError, Stream};

/// How long the device is polled without a pause. A decode step of a large model takes a few milliseconds, and a
/// sleeping thread wakes up late.
const SPIN: Duration = Duration::from_millis(5);

/// Pause between polls after that.
const PAUSE: Duration = Duration::from_micros(100);

/// Measures how long nothing has arrived.
#[derive(Debug, Default)]
pub struct Standstill {
    /// Bytes that had arrived, and when their number last grew; `None` before the first look.
    seen: Option<(u64, Instant)>,
}

impl Standstill {
    /// How long the number of arrived bytes has been `bytes`.
    pub fn since(&mut self, bytes: u64, now: Instant) -> Duration {
        let seen = self.seen.filter(|(seen, _)| *seen == bytes);
        let (_, since) = *self.seen.insert(seen.unwrap_or((bytes, now)));
        now.saturating_duration_since(since)
    }
}

/// Tracks whether work is in flight, and waits for it with a timeout.
pub struct Waiter {
    done: Event,
    busy: bool,
    patience: Duration,
    /// Incremented while it waits.
    heartbeat: Arc<AtomicU64>,
}

impl Waiter {
    /// A waiter that gives up on the device after `patience`.
    ///
    /// # Errors
    /// [`HipError`].
    pub fn new(device: &Device, patience: Duration) -> Result<Self, HipError> {
        Ok(Self { done: device.event(false)?, busy: false, patience, heartbeat: Arc::default() })
    }

    /// Sets the counter to increment while waiting.
    pub fn set_heartbeat(&mut self, heartbeat: Arc<AtomicU64>) {
        self.heartbeat = heartbeat;
    }

    /// Increments the heartbeat.
    pub fn beat(&self) {
        self.heartbeat.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that work is in flight.
    pub fn set_busy(&mut self) {
        self.busy = true;
    }

    /// Waits until all work on `stream` is done.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`], also on a timeout; [`BackendError::Device`].
    pub fn wait_for_device(&mut self, device: &Device, stream: &Stream) -> Result<(), BackendError> {
        if !self.busy {
            return Ok(());
        }
        self.busy = false; // also after a failure, nothing more is waited for
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

    /// Marks the device as lost because it did not finish `what` in time.
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
