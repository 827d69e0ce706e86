//! How long the compute stream stood still for weights.
//!
//! The host cannot measure this. While it reads files the device may still compute, and after it has submitted a
//! tensor's copies the device may still wait for them. So two events in the stream enclose each wait, from the first
//! load or missing weight of a unit until its weights are resident. The device reports the time between them.

use std::time::Duration;

use crate::backend::hip::{Device, Event, HipError, Stream};

/// The waits of the current step.
#[derive(Debug, Default)]
pub struct LoadWaits {
    /// Events before and after each wait, reused from step to step.
    pairs: Vec<[Event; 2]>,
    /// Number of pairs used in the current step.
    used: usize,
    /// The next pair's first event is recorded.
    open: bool,
    in_step: bool,
}

impl LoadWaits {
    /// Starts a step.
    pub fn begin(&mut self) {
        *self = Self { pairs: std::mem::take(&mut self.pairs), in_step: true, ..Self::default() };
    }

    /// Starts a wait, because a weight is loading or not resident. Does nothing outside of a step.
    ///
    /// # Errors
    /// [`HipError`].
    pub fn enter(&mut self, device: &Device, stream: &Stream) -> Result<(), HipError> {
        if self.open || !self.in_step {
            return Ok(());
        }
        if self.used == self.pairs.len() {
            self.pairs.push([device.event(true)?, device.event(true)?]);
        }
        if let Some([before, _]) = self.pairs.get(self.used) {
            stream.record(before)?;
            self.open = true;
        }
        Ok(())
    }

    /// Ends the wait: the stream now waits for all that the next unit needs, and work follows.
    ///
    /// # Errors
    /// [`HipError`].
    pub fn leave(&mut self, stream: &Stream) -> Result<(), HipError> {
        if std::mem::take(&mut self.open)
            && let Some([_, after]) = self.pairs.get(self.used)
        {
            stream.record(after)?;
            self.used += 1;
        }
        Ok(())
    }

    /// Whether the step waited.
    pub fn any(&self) -> bool {
        self.used > 0
    }

    /// Ends the step and returns how long it waited. The step's work on the device must be done.
    ///
    /// # Errors
    /// [`HipError`].
    pub fn end(&mut self) -> Result<Duration, HipError> {
        (self.in_step, self.open) = (false, false);
        let pairs = self.pairs.iter().take(std::mem::take(&mut self.used));
        let mut milliseconds = 0.0;
        for [before, after] in pairs {
            milliseconds += f64::from(after.milliseconds_since(before)?.max(0.0));
        }
        Ok(Duration::from_secs_f64(milliseconds / 1e3))
    }
}
