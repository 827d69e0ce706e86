//! The gateway's end, in steps: routers are told, then requests are refused, then running answers have had their time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use rocmforge_client::wire::ErrorCode;
use tokio::sync::watch;

use crate::failure::Failure;

/// Seconds after which a client may try again: by then a gateway that was restarted serves.
const RETRY_AFTER_S: u32 = 1;

/// How far the end has come, and what it waits for.
#[derive(Debug, Default)]
pub struct Ending {
    /// Steps are only ever taken forward.
    step: AtomicU8,
    /// Requests whose response is not yet written.
    running: Arc<watch::Sender<u64>>,
}

/// Counts a request as running until it is dropped.
#[derive(Debug)]
pub struct Runs(Arc<watch::Sender<u64>>);

impl Drop for Runs {
    fn drop(&mut self) {
        self.0.send_modify(|running| *running -= 1);
    }
}

/// Routers are told to send no more.
const TOLD: u8 = 1;
/// New requests are refused.
const REFUSING: u8 = 2;

impl Ending {
    /// From now on `/health` says that the gateway stops, and every response ends its connection.
    pub fn tell(&self) {
        self.step.fetch_max(TOLD, Ordering::AcqRel);
    }

    /// From now on new requests are refused.
    pub fn refuse(&self) {
        self.step.fetch_max(REFUSING, Ordering::AcqRel);
    }

    /// Counts a request as running.
    pub fn runs(&self) -> Runs {
        self.running.send_modify(|running| *running += 1);
        Runs(Arc::clone(&self.running))
    }

    /// Waits until no request runs.
    pub async fn none_runs(&self) {
        // The sender lives as long as this: waiting cannot fail.
        let _ = self.running.subscribe().wait_for(|running| *running == 0).await;
    }

    /// True once [`Ending::tell`] was called.
    pub fn has_begun(&self) -> bool {
        self.step.load(Ordering::Acquire) >= TOLD
    }

    /// True once [`Ending::refuse`] was called.
    pub fn is_refusing(&self) -> bool {
        self.step.load(Ordering::Acquire) >= REFUSING
    }
}

/// The refusal of a request that may be made again, here later or elsewhere now.
pub fn stopping() -> Failure {
    let message = "the gateway is stopping: ask another one, or this one after it has restarted";
    let failure = Failure::new(503, message).coded(ErrorCode::ServerDraining.name());
    Failure { retry_after_s: Some(RETRY_AFTER_S), ..failure }
}
