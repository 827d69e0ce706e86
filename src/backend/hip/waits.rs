//! How long the compute stream stood still for weights.
//!
//! The host cannot tell: while it reads files the device may still compute, and when it has submitted a tensor's copies the
//! device may still wait for them. So two events stand in the stream around each wait, from the first load or missing weight
//! of a unit to the moment its weights are there, and the device says what lay between.

use std::time::Duration;

use super::{Device, Event, HipError, Stream};

/// The waits of the step at hand.
#[derive(Debug, Default)]
pub struct LoadWaits {
    /// Before and after each wait; reused from step to step.
    pairs: Vec<[Event; 2]>,
    /// Pairs of the step at hand.
    used: usize,
    /// The pair after those is begun.
    open: bool,
    in_step: bool,
}

impl LoadWaits {
    /// A step begins.
    pub fn begin(&mut self) {
        *self = Self { pairs: std::mem::take(&mut self.pairs), in_step: true, ..Self::default() };
    }

    /// Something is loaded or not there yet: what the stream does from here on is wait. Outside of steps nothing waits.
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

    /// The stream was told to wait for all that the next unit needs: what comes after is work.
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

    /// Whether the step waited at all.
    pub fn any(&self) -> bool {
        self.used > 0
    }

    /// The step is over, and so is its work on the device: how long it waited.
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
