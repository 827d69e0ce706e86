//! Looks after passed files in memory that have lost their names.

use std::sync::Weak;
use std::time::Duration;

use crate::session::Service;

/// How long the daemon may hold such a file alone.
const PERIOD: Duration = Duration::from_secs(5);

/// Unloads them until the service is gone. Without such files a look costs a lock: a thread for blocking work every few seconds would
/// be kept for ever.
pub(super) async fn look_after(service: Weak<Service>) {
    loop {
        tokio::time::sleep(PERIOD).await;
        let Some(service) = service.upgrade() else { return };
        if service.has_files_in_memory() {
            let _ = tokio::task::spawn_blocking(move || service.unload_nameless()).await;
        }
    }
}
