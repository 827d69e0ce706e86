//! Looks after passed files in memory that have lost their names.

use std::sync::Weak;
use std::time::Duration;

use crate::model::store::Store;

/// How long the daemon may hold such a file alone.
const PERIOD: Duration = Duration::from_secs(5);

/// Unloads them until the store is gone. Without such files a look costs a lock.
pub(super) async fn look_after(store: Weak<Store>) {
    loop {
        tokio::time::sleep(PERIOD).await;
        let Some(store) = store.upgrade() else { return };
        if store.has_files_in_memory() {
            let _ = tokio::task::spawn_blocking(move || store.unload_nameless()).await;
        }
    }
}
