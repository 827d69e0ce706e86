//! When the last copy from or to some host memory is over.

use std::sync::Arc;

use super::super::error::HipError;
use super::context::Context;
use super::event::Event;
use super::stream::Stream;

/// The last transfer of some host memory: an event recorded behind it, and whether it is still to be waited for. The
/// memory's owner calls [`Transfer::end`] before it gives the memory back.
#[derive(Debug)]
pub(super) struct Transfer {
    done: Event,
    busy: bool,
}

impl Transfer {
    /// None yet.
    pub fn new(context: &Arc<Context>) -> Result<Self, HipError> {
        Ok(Self { done: Event::new(context, false)?, busy: false })
    }

    /// A copy was submitted to `stream`: it is the last one now.
    pub fn begun(&mut self, stream: &Stream) -> Result<(), HipError> {
        self.busy = true;
        if let Err(error) = stream.record(&self.done) {
            // Without the event nobody could tell when the copy ends: it is waited for here.
            stream.synchronize()?;
            return Err(error);
        }
        Ok(())
    }

    /// Whether it is over: [`Transfer::wait`] does not wait then.
    pub fn is_over(&self) -> Result<bool, HipError> {
        if self.busy { self.done.is_done() } else { Ok(true) }
    }

    /// Waits until it is over.
    pub fn wait(&mut self) -> Result<(), HipError> {
        if self.busy {
            self.done.synchronize()?;
            self.busy = false;
        }
        Ok(())
    }

    /// As [`Transfer::wait`], where nobody can be told of an error. A lost device transfers no more.
    pub fn end(&mut self) {
        if let Err(error) = self.wait() {
            tracing::debug!(%error, "a transfer's end was not seen");
        }
    }
}
