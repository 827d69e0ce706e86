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
