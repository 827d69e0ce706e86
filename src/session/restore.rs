//! Gives kept prefixes back to the engine before requests that begin with them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

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
    coming: Mutex<BTreeMap<Key, watch::Receiver<()>>>,
    /// One prompt's pages are read at a time: they may have as many bytes as all files together.
    reading: tokio::sync::Mutex<()>,
}

impl Restores {
    pub fn new(store: Arc<PrefixStore>) -> Self {
        let coming = Mutex::new(Rank::PrefixRestores, BTreeMap::new());
        Self { store, coming, reading: tokio::sync::Mutex::default() }
    }

    /// Gives those kept prefixes of a user and model back that a prompt begins with, if there are any. Requests that come
    /// meanwhile wait for the same file. A request that is cancelled meanwhile does not take it with it.
    pub async fn bring(
        self: &Arc<Self>,
        engine: &EngineHandle,
        uid: u32,
        model: &Arc<Model>,
        prompt: &[u32],
    ) {
        if self.store.is_empty() {
            return; // most requests: no digest is made
        }
        let key = self.store.key(uid, model);
        let all = async {
            while self.store.has(&key, prompt) {
                let mut coming = self.coming(engine, key, uid, model, prompt);
                let _ = coming.changed().await; // an error, when the other end is gone
            }
        };
        // After that the file that is being read goes on for later requests.
        let _ = tokio::time::timeout(PATIENCE, all).await;
    }

    /// Begins to give a prompt's pages back, unless another one has the file now. The receiver notices the end of either.
    fn coming(
        self: &Arc<Self>,
        engine: &EngineHandle,
        key: Key,
        uid: u32,
        model: &Arc<Model>,
        prompt: &[u32],
    ) -> watch::Receiver<()> {
        let mut coming = self.coming.lock();
        if let Some(there) = coming.get(&key) {
            return there.clone();
        }
        let (back, receiver) = watch::channel(());
        coming.insert(key, receiver.clone());
        drop(coming);
        let coming = Coming { restores: Arc::clone(self), key, _back: back };
        let (engine, model, prompt) = (engine.clone(), Arc::clone(model), prompt.to_vec());
        tokio::spawn(async move { coming.restores.restore(&engine, key, uid, &model, prompt).await });
        receiver
    }

    async fn restore(&self, engine: &EngineHandle, key: Key, uid: u32, model: &Arc<Model>, prompt: Vec<u32>) {
        let _alone = self.reading.lock().await;
        let store = Arc::clone(&self.store);
        let read = tokio::task::spawn_blocking(move || store.read(key, &prompt)).await;
        let Ok(Some(mut offer)) = read else { return };
        let prefixes = offer.take();
        let pages = prefixes.pages.len();
        let taken = match engine.restore_prefixes(model, uid, prefixes).await {
            Ok(taken) => {
                tracing::info!(uid, model = model.name, pages, taken, "kept prefixes are back on the device");
                taken
            }
            Err(error) => {
                tracing::info!(uid, model = model.name, %error, "kept prefixes cannot be used now");
                0
            }
        };
        // All pages taken: it removes the file.
        let store = Arc::clone(&self.store);
        let _ = tokio::task::spawn_blocking(move || store.given(&offer, taken)).await;
    }
}

/// A file on its way to the engine. Its end, also by a panic, lets the next request have the file.
struct Coming {
    restores: Arc<Restores>,
    key: Key,
    /// Those that wait notice when this drops: after the entry is gone.
    _back: watch::Sender<()>,
}

impl Drop for Coming {
    fn drop(&mut self) {
        self.restores.coming.lock().remove(&self.key);
    }
}
