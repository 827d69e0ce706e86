//! Drives the loads that clients asked for.

use std::sync::Arc;

use super::Core;
use crate::lock;
use crate::model::ModelId;
use crate::scheduler::JobError;
use crate::scheduler::loads::lost_device;

impl Core {
    /// Looks at what is in flight and begins more. True when something moved.
    pub(super) fn drive_loads(&mut self) -> bool {
        if let Err(lost) = self.device.backend.watch_loads(self.device.loads.are_in_flight()) {
            self.replace_device(&lost);
            return true;
        }
        let mut moved = self.device.loads.look();
        let shared = Arc::clone(&self.shared);
        let wake = || -> Box<dyn FnOnce() + Send> {
            let shared = Arc::clone(&shared);
            Box::new(move || {
                shared.inbox.lock().woken = true;
                shared.wake.notify_one();
            })
        };
        while let Some(ended) = self.device.drive_loads(&mut self.schedule, &wake, &mut moved) {
            let lost = ended.error.as_ref().and_then(lost_device);
            match &ended.error {
                // The model is used: weights just loaded are not the first to leave.
                None => self.device.models.used(ended.model, lock::now()),
                Some(_) => {
                    moved = true;
                    self.device.residency.clear_failed();
                }
            }
            self.publish(); // before the requester is told: it finds the result in the snapshot
            ended.tell();
            if let Some(lost) = lost {
                self.replace_device(&lost); // ends the other loads as well
                return true;
            }
        }
        moved
    }

    /// Ends all requests for weights, or those for one model.
    pub(super) fn fail_loads(&mut self, of: Option<ModelId>, error: &dyn Fn() -> JobError) {
        for ended in self.device.loads.fail(of, error) {
            ended.tell();
        }
    }
}
