//! Watchdog notices for the service manager.
//!
//! They are sent only while three counters increase: the runtime's (this task and a ticking one beside it), the accept
//! loop's and the engine's. A daemon whose engine hangs is not healthy, however fast it answers pings.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::time::MissedTickBehavior;

use super::Pulses;

/// Sends a notice three times per `period`, as long as all counters increase.
pub(super) async fn feed(period: Duration, pulses: Pulses) {
    let ticks = Arc::new(AtomicU64::new(0));
    let step = period / 3;
    let counted = Arc::clone(&ticks);
    let ticker = tokio::spawn(async move {
        loop {
            counted.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(step / 4).await;
        }
    });
    let mut interval = tokio::time::interval(step);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last: Option<Beat> = None;
    loop {
        interval.tick().await;
        let now = Beat {
            runtime: ticks.load(Ordering::Relaxed),
            acceptor: pulses.acceptor.ticks(),
            engine: pulses.engine.heartbeat(),
        };
        if last.is_none_or(|last| now.is_alive_since(last, pulses.service.is_draining())) {
            let _ = sd_notify::notify(&[NotifyState::Watchdog]);
        } else {
            tracing::error!(?now, ?last, "the daemon hangs: not all watchdog counters increased");
        }
        last = Some(now);
        if ticker.is_finished() {
            return;
        }
    }
}

/// Three counters that increase while the daemon is healthy.
#[derive(Clone, Copy, Debug)]
struct Beat {
    runtime: u64,
    acceptor: u64,
    engine: u64,
}

impl Beat {
    /// True when all have increased. A stopping daemon accepts no more, so its accept counter does not matter.
    fn is_alive_since(self, last: Self, stopping: bool) -> bool {
        let accepting = self.acceptor != last.acceptor || stopping;
        self.runtime != last.runtime && accepting && self.engine != last.engine
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_count_that_stands_is_no_sign_of_life() {
        let last = Beat { runtime: 1, acceptor: 1, engine: 1 };
        let all = Beat { runtime: 2, acceptor: 2, engine: 2 };
        assert!(all.is_alive_since(last, false));
        assert!(!Beat { engine: 1, ..all }.is_alive_since(last, false), "a hanging step");
        assert!(!Beat { runtime: 1, ..all }.is_alive_since(last, false));
        assert!(!Beat { acceptor: 1, ..all }.is_alive_since(last, false));
        assert!(Beat { acceptor: 1, ..all }.is_alive_since(last, true));
        assert!(!Beat { engine: 1, ..all }.is_alive_since(last, true));
    }
}
