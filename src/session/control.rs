//! The handles that steer a request while it runs: its end, and its credit on the way to the engine.

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::lock::{Mutex, Rank};
use crate::scheduler::SequenceId;

/// Handles to steer a request while it runs.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) cancel: CancellationToken,
    credit: Mutex<CreditSink>,
    /// Notified when credit is saved.
    granted: Notify,
}

/// Destination of granted credit.
#[derive(Debug)]
pub(super) enum CreditSink {
    /// Saved until the sequence is submitted.
    Saved(u32),
    /// Passed on to the engine.
    Sequence(SequenceId),
}

impl Control {
    pub(super) fn new(credit: u32) -> Self {
        Self {
            cancel: CancellationToken::new(),
            credit: Mutex::new(Rank::Credit, CreditSink::Saved(credit)),
            granted: Notify::new(),
        }
    }

    /// Saves granted credit, or passes it on to the request's sequence.
    pub(super) fn credit(&self, items: u32, pass_on: impl FnOnce(SequenceId, u32)) {
        match &mut *self.credit.lock() {
            CreditSink::Saved(saved) => {
                *saved = saved.saturating_add(items);
                self.granted.notify_one();
            }
            CreditSink::Sequence(id) => pass_on(*id, items),
        }
    }

    /// Takes one item of credit if there is any: for requests without a sequence.
    pub(super) fn take_credit(&self) -> bool {
        match &mut *self.credit.lock() {
            CreditSink::Saved(saved @ 1..) => {
                *saved -= 1;
                true
            }
            _ => false,
        }
    }

    /// Waits for one item of credit and takes it.
    pub(super) async fn wait_credit(&self) {
        while !self.take_credit() {
            self.granted.notified().await;
        }
    }

    /// Submits the request's sequence with the saved credit. Credit granted meanwhile waits on the lock until the
    /// sequence is known: the engine ignores credit for an unknown sequence.
    pub(super) fn submit<E>(
        &self,
        id: SequenceId,
        submit: impl FnOnce(u32) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut sink = self.credit.lock();
        let saved = match &*sink {
            CreditSink::Saved(items) => *items,
            CreditSink::Sequence(_) => 0, // a stream is one request: this was not set before
        };
        submit(saved)?;
        *sink = CreditSink::Sequence(id);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn credit_granted_while_a_sequence_is_submitted_is_not_lost() {
        let control = Control::new(3);
        control.credit(4, |_, _| unreachable!("nothing was submitted"));
        let id = SequenceId(9);
        let live = AtomicBool::new(false);
        let passed_on = AtomicU32::new(0);
        let (granting, granted) = channel();
        std::thread::scope(|scope| {
            let submitted: Result<(), ()> = control.submit(id, |saved| {
                assert_eq!(saved, 7);
                scope.spawn(|| {
                    granting.send(()).unwrap();
                    control.credit(5, |to, items| {
                        assert!(live.load(Ordering::SeqCst), "the engine would ignore it");
                        assert_eq!(to, id);
                        passed_on.fetch_add(items, Ordering::SeqCst);
                    });
                });
                granted.recv().unwrap();
                std::thread::sleep(Duration::from_millis(50)); // time for a wrong call to happen
                live.store(true, Ordering::SeqCst);
                Ok(())
            });
            assert_eq!(submitted, Ok(()));
        });
        assert_eq!(passed_on.into_inner(), 5);
    }

    #[test]
    fn credit_of_a_request_that_was_refused_stays_here() {
        let control = Control::new(3);
        assert_eq!(control.submit(SequenceId(9), |_| Err("full")), Err("full"));
        control.credit(5, |_, _| unreachable!("there is no sequence"));
        assert!(matches!(*control.credit.lock(), CreditSink::Saved(8)));
    }
}
