//! Recovers from a panic or a lost device.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::{Core, limits};
use crate::backend::{BackendError, Closed};
use crate::scheduler::device::Device;
use crate::scheduler::schedule::Schedule;
use crate::scheduler::snapshot::EngineEvent;
use crate::scheduler::{Event, JobError};

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
                self.paused.retain(|(model, _), _| *model != step.model);
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

    /// After the device was lost: fails all requests and reopens a device. Ends the engine if none can be opened.
    pub(super) fn replace_device(&mut self, error: &BackendError) {
        tracing::error!(%error, "the device was lost: all requests fail, and the engine reopens it");
        let on = match self.reopen(&|| JobError::Backend(error.clone())) {
            Ok(()) => format!("the engine continues on {}", self.device.backend.info().device),
            Err(error) => {
                tracing::error!(%error, "no device could be opened: the engine ends");
                self.lost = true;
                "no device could be opened, and the engine ends".to_owned()
            }
        };
        self.tell(EngineEvent::DeviceLost { text: format!("{error}; {on}") });
    }

    /// Fails everything with `error`, then reopens the device, or another one that the factory opens instead.
    ///
    /// # Errors
    /// When no device can be opened.
    pub(super) fn reopen(&mut self, error: &dyn Fn() -> JobError) -> Result<(), BackendError> {
        self.in_step = None;
        self.restores.clear();
        self.paused.clear();
        self.fail_loads(None, error);
        let sequences = self.schedule.clear();
        self.counters.sequences_failed += sequences.len() as u64;
        self.ended.extend(sequences.into_iter().map(|sequence| (sequence, Event::Failed(error()))));
        // Drop the old device first: the new one may be the same and need its memory.
        let host = std::mem::take(&mut self.device.host);
        self.device = Device::new(Box::new(Closed), self.options.keeper.clone(), host);
        let opened = (self.factory)().map(|mut backend| {
            backend.set_heartbeat(Arc::clone(&self.shared.heartbeat));
            self.shared.set_device(backend.as_ref(), &self.options);
            self.device.backend = backend;
        });
        self.schedule = Schedule::new(limits(&self.options, &self.shared));
        self.shares_seen = 0;
        self.send_ended();
        opened
    }
}
