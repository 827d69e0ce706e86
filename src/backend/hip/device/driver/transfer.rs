//! End of the last copy from or to a piece of host memory.

use std::sync::Arc;

use super::context::Context;
use super::event::Event;
use super::stream::Stream;
use crate::backend::hip::device::error::HipError;

/// The last transfer of some host memory: the event recorded after it, and whether it may still be in flight. The
/// memory's purpose calls [`Transfer::end`] before it frees the memory.
#[derive(Debug)]
pub(super) struct Transfer {
    done: Event,
    busy: bool,
}

impl Transfer {
    /// No transfer yet.
    pub fn new(context: &Arc<Context>) -> Result<Self, HipError> {
        Ok(Self { done: Event::new(context, false)?, busy: false })
    }

    /// Records that a copy was submitted to `stream`; it is now the last one.
    pub fn begun(&mut self, stream: &Stream) -> Result<(), HipError> {
        self.busy = true;
        if let Err(error) = stream.record(&self.done) {
            // Without the event nothing marks the end of the copy, so wait for it here.
            stream.synchronize()?;
            return Err(error);
        }
        Ok(())
    }

    /// Whether the transfer is done, so that [`Transfer::wait`] does not wait.
    pub fn is_over(&self) -> Result<bool, HipError> {
        if self.busy { self.done.is_done() } else { Ok(true) }
    }

    /// Waits until the transfer is done.
    pub fn wait(&mut self) -> Result<(), HipError> {
        if self.busy {
            self.done.synchronize()?;
            self.busy = false;
        }
        Ok(())
    }

    /// Like [`Transfer::wait`], but only logs an error. A lost device transfers nothing more.
    pub fn end(&mut self) {
        if let Err(error) = self.wait() {
            tracing::debug!(%error, "waiting for a transfer failed");
        }
    }
}
