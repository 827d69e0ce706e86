//! Going on after a panic, or after the device was lost.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::{Core, limits};
use crate::backend::{BackendError, Closed};
use crate::scheduler::device::Device;
use crate::scheduler::schedule::Schedule;
use crate::scheduler::snapshot::EngineEvent;
use crate::scheduler::{Event, JobError};

/// Bytes of a panic's text that are passed on.
const PANIC_TEXT_MAX: usize = 256;

impl Core {
    /// Cleans up after a panic.
    ///
    /// # Errors
    /// When the device cannot be opened again.
    pub(super) fn recover(&mut self, text: String) -> Result<(), BackendError> {
        tracing::error!(panic = text, in_step = self.in_step.is_some(), "the engine panicked");
        let step = self.in_step.take();
        let local = step.is_some_and(|step| {
            catch_unwind(AssertUnwindSafe(|| {
                if let Some(slot) = self.device.models.take_slot(step.model) {
                    self.device.backend.close_model(slot);
                }
                for work in &step.work {
                    self.fail(work.id, JobError::Panicked(text.clone()));
                }
                self.schedule.rewind(step.model);
                self.send_ended();
            }))
            .is_ok()
        });
        if local {
            return Ok(());
        }
        self.reopen(&|| JobError::Panicked(text.clone()))
    }

    /// After the device was lost: all requests fail, and another is opened, or the engine ends.
    pub(super) fn replace_device(&mut self, error: &BackendError) {
        tracing::error!(%error, "all requests fail, and the device is opened anew");
        let on = match self.reopen(&|| JobError::Backend(error.clone())) {
            Ok(()) => format!("it goes on with {}", self.device.backend.info().device),
            Err(error) => {
                tracing::error!(%error, "there is no device any more: the engine ends");
                self.lost = true;
                "there is no other, and the engine ends".to_owned()
            }
        };
        self.tell(EngineEvent::DeviceLost { text: format!("{error}; {on}") });
    }

    /// Fails everything with `error` and opens the device anew, or another one that the factory has instead.
    ///
    /// # Errors
    /// When there is no device to be opened.
    pub(super) fn reopen(&mut self, error: &dyn Fn() -> JobError) -> Result<(), BackendError> {
        self.in_step = None;
        self.fail_loads(None, error);
        let sequences = self.schedule.clear();
        self.counters.sequences_failed += sequences.len() as u64;
        self.ended.extend(sequences.into_iter().map(|sequence| (sequence, Event::Failed(error()))));
        // The old one goes first: it may be the same device, and hold all its memory.
        self.device = Device::new(Box::new(Closed));
        let opened = (self.factory)().map(|mut backend| {
            backend.set_heartbeat(Arc::clone(&self.shared.heartbeat));
            self.shared.set_device(backend.as_ref(), &self.options);
            self.device.backend = backend;
        });
        self.schedule = Schedule::new(limits(&self.options, &self.shared));
        self.send_ended();
        opened
    }
}

/// What a panic said.
pub(super) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let mut text = text.unwrap_or("a panic without a text").to_owned();
    while text.len() > PANIC_TEXT_MAX {
        text.pop();
    }
    text
}
