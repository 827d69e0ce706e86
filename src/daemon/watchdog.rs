//! Signs of life for the service manager.
//!
//! Sent only while three things move: the runtime (this task and a ticking one beside it), the accept loop, the engine. A
//! daemon whose engine hangs is not alive, however fast it answers pings.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::time::MissedTickBehavior;

use super::Pulses;

/// Sends signs of life three times per `period`, for as long as all pulses move.
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
    let mut last = None;
    loop {
        interval.tick().await;
        let now = (ticks.load(Ordering::Relaxed), pulses.acceptor.ticks(), pulses.engine.heartbeat());
        let moved = last.is_none_or(|(runtime, acceptor, engine)| {
            // A daemon that stops accepts no more, and has its own end in sight.
            let accepting = now.1 != acceptor || pulses.service.is_draining();
            now.0 != runtime && accepting && now.2 != engine
        });
        last = Some(now);
        if moved {
            let _ = sd_notify::notify(&[NotifyState::Watchdog]);
        } else {
            tracing::error!(
                runtime = now.0,
                acceptor = now.1,
                engine = now.2,
                "no sign of life: something hangs"
            );
        }
        if ticker.is_finished() {
            return;
        }
    }
}
