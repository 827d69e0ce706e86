//! Gives kept prefixes back to the engine before the first request that can use them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OnceCell;

use crate::lock::{Mutex, Rank};
use crate::model::Model;
use crate::prefixes::{Key, PrefixStore};
use crate::scheduler::EngineHandle;

/// Longest time that a request waits for a file. A GPU computes some prompts faster than a disk reads their pages.
const PATIENCE: Duration = Duration::from_millis(500);

/// Files on their way to the engine.
#[derive(Debug)]
pub(super) struct Restores {
    pub store: Arc<PrefixStore>,
    coming: Mutex<BTreeMap<Key, Arc<OnceCell<()>>>>,
    /// One file is read at a time: it may have as many bytes as all together.
    reading: tokio::sync::Mutex<()>,
}

impl Restores {
    pub fn new(store: Arc<PrefixStore>) -> Self {
        let coming = Mutex::new(Rank::PrefixRestores, BTreeMap::new());
        Self { store, coming, reading: tokio::sync::Mutex::default() }
    }

    /// Gives a user's kept prefixes of a model back, if there are any. Requests that come meanwhile wait for the same file.
    /// A request that is cancelled meanwhile does not take it with it.
    pub async fn bring(self: &Arc<Self>, engine: &EngineHandle, uid: u32, model: &Arc<Model>) {
        let Some((key, cell)) = self.coming(uid, model) else { return };
        let work = || async {
            let (this, engine, model) = (Arc::clone(self), engine.clone(), Arc::clone(model));
            let task = tokio::spawn(async move {
                this.restore(&engine, key, uid, &model).await;
                this.coming.lock().remove(&key);
            });
            let _ = task.await; // it fails only while the daemon ends
        };
        // After that it goes on for later requests.
        let _ = tokio::time::timeout(PATIENCE, cell.get_or_init(work)).await;
    }

    /// The file for a user's requests to a model, if it is there or on its way.
    fn coming(&self, uid: u32, model: &Model) -> Option<(Key, Arc<OnceCell<()>>)> {
        let mut coming = self.coming.lock();
        if coming.is_empty() && self.store.is_empty() {
            return None; // most requests: no digest is made
        }
        let key = self.store.key(uid, model);
        let cell = match coming.get(&key) {
            Some(cell) => Arc::clone(cell),
            None if self.store.has(&key) => Arc::clone(coming.entry(key).or_default()),
            None => return None,
        };
        Some((key, cell))
    }

    async fn restore(&self, engine: &EngineHandle, key: Key, uid: u32, model: &Arc<Model>) {
        let _alone = self.reading.lock().await;
        let store = Arc::clone(&self.store);
        let Ok(Some(prefixes)) = tokio::task::spawn_blocking(move || store.take(key)).await else { return };
        let pages = prefixes.pages.len();
        match engine.restore_prefixes(model, uid, prefixes).await {
            Ok(taken) => {
                tracing::info!(uid, model = model.name, pages, taken, "kept prefixes are back on the device");
            }
            Err(error) => {
                tracing::info!(uid, model = model.name, %error, "kept prefixes cannot be used now");
            }
        }
    }
}
