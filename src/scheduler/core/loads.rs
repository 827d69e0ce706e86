//! Drives the loads that clients requested.

use std::sync::Arc;

use super::{Core, waker};
use crate::lock;
use crate::model::ModelId;
use crate::scheduler::JobError;
use crate::scheduler::loads::lost_device;

impl Core {
    /// Records arrivals and begins more loads. True when something moved.
    pub(super) fn drive_loads(&mut self) -> bool {
        if let Err(lost) = self.device.backend.watch_loads(self.device.loads.are_in_flight()) {
            self.replace_device(&lost);
            return true;
        }
        let mut moved = self.device.loads.look();
        let waker = waker(&self.shared);
        let wake = || -> Box<dyn FnOnce() + Send> {
            let waker = Arc::clone(&waker);
            Box::new(move || waker())
        };
        while let Some(ended) = self.device.drive_loads(&mut self.schedule, &wake, &mut moved) {
            let lost = ended.error.as_ref().and_then(lost_device);
            match &ended.error {
                // The load counts as a use, so that these weights are not evicted first.
                None => self.device.models.used(ended.model, lock::now()),
                Some(_) => {
                    moved = true;
                    self.device.residency.clear_failed();
                }
            }
            self.publish(); // before the requester is notified: it must find the result in the snapshot
            ended.tell();
            if let Some(lost) = lost {
                self.replace_device(&lost); // ends the other loads as well
                return true;
            }
        }
        moved
    }

    /// Ends all client loads, or those for one model.
    pub(super) fn fail_loads(&mut self, of: Option<ModelId>, error: &dyn Fn() -> JobError) {
        for ended in self.device.loads.fail(of, error) {
            ended.tell();
        }
    }
}
