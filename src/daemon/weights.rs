//! Loads the weights that the configuration wants on the device, at start and after reloads.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::config::{ModelWeights, PreloadChoice, PreloadName};
use crate::model::Model;
use crate::model::store::{Lease, Store, StoreError};
use crate::scheduler::{EngineHandle, JobError, Preload, RulesChange};
use crate::session::{DraftModels, check_draft_model};

/// Wanted settings by model name; `None` for a model whose entry was removed.
pub(super) type Changes = BTreeMap<String, Option<ModelWeights>>;

/// The draft models that a configuration names.
pub(super) fn draft_models(wanted: &BTreeMap<String, ModelWeights>) -> DraftModels {
    wanted.iter().filter_map(|(name, of)| Some((name.clone(), of.draft.clone()?))).collect()
}

/// Differences between two configurations.
pub(super) fn changes(old: &BTreeMap<String, ModelWeights>, new: &BTreeMap<String, ModelWeights>) -> Changes {
    let gone = old.keys().filter(|name| !new.contains_key(*name)).map(|name| (name.clone(), None));
    let other = new.iter().filter(|(name, wanted)| old.get(*name) != Some(wanted));
    gone.chain(other.map(|(name, wanted)| (name.clone(), Some(wanted.clone())))).collect()
}

/// Starts the task that applies the settings; it ends when the sender drops. It first waits for `ruled`: models with
/// rules from before a restart, which they keep until their entry changes.
pub(super) fn start(
    store: Arc<Store>,
    engine: EngineHandle,
    wanted: Changes,
    ruled: impl Future<Output = BTreeSet<String>> + Send + 'static,
) -> Sender<Changes> {
    let (sender, receiver) = channel(1);
    tokio::spawn(async move {
        let keeper = Keeper { store, engine, ruled: ruled.await, left: wanted, missing: Changes::new() };
        keeper.run(receiver).await;
    });
    sender
}

struct Keeper {
    store: Arc<Store>,
    engine: EngineHandle,
    ruled: BTreeSet<String>,
    /// Settings still to apply.
    left: Changes,
    /// Models that were not found; tried again with the next changes.
    missing: Changes,
}

impl Keeper {
    /// Sets rules and loads weights, one model after the other, while clients are served. Failures are logged as
    /// warnings. A change interrupts the current model, which then continues unless it is no longer wanted.
    async fn run(mut self, mut changes: Receiver<Changes>) {
        loop {
            let next = self.left.first_key_value().map(|(name, wanted)| (name.clone(), wanted.clone()));
            let changed = match &next {
                None => changes.recv().await,
                Some((name, wanted)) => tokio::select! {
                    biased;
                    changed = changes.recv() => changed,
                    there = self.apply(name, wanted.as_ref()) => {
                        let done = self.left.remove_entry(name).filter(|_| !there);
                        self.missing.extend(done);
                        continue;
                    }
                },
            };
            let Some(changed) = changed else { return };
            self.ruled.retain(|name| !changed.contains_key(name));
            let mut missing = std::mem::take(&mut self.missing);
            missing.append(&mut self.left);
            missing.extend(changed);
            self.left = missing;
        }
    }

    /// False when the model does not exist.
    async fn apply(&self, name: &str, wanted: Option<&ModelWeights>) -> bool {
        let done = match wanted {
            None => self.forget(name).await,
            Some(wanted) => match self.acquire(name).await {
                Err(error) => {
                    tracing::warn!("weights.models names {name}, which cannot be opened: {error}");
                    return false;
                }
                Ok(lease) => self.bring(name, &lease, wanted).await,
            },
        };
        if let Err(error) = done {
            tracing::warn!("applying weights.models to {name} failed: {error}");
        }
        true
    }

    async fn acquire(&self, name: &str) -> Result<Lease, StoreError> {
        let (store, asked) = (Arc::clone(&self.store), name.to_owned());
        let acquired = tokio::task::spawn_blocking(move || store.acquire(uid(), &asked)).await;
        let ends = |_| StoreError::NotFound { name: name.to_owned() };
        acquired.map_err(ends)?.map(|(lease, _)| lease)
    }

    async fn bring(&self, name: &str, lease: &Lease, wanted: &ModelWeights) -> Result<(), JobError> {
        if !self.ruled.contains(name) {
            self.set_rules(lease.model(), wanted).await?;
        }
        if let Some(draft) = &wanted.draft {
            self.look_at_draft_model(name, lease, draft).await;
        }
        match &wanted.preload {
            Some(choice) => preload(&self.engine, lease, choice).await,
            None => Ok(()),
        }
    }

    /// Warns if a draft model cannot draft. Requests then go on without it.
    async fn look_at_draft_model(&self, name: &str, lease: &Lease, draft: &str) {
        let (store, engine) = (Arc::clone(&self.store), self.engine.clone());
        let (model, asked) = (Arc::clone(lease.model()), draft.to_owned());
        let look = move || match store.acquire(uid(), &asked) {
            Err(error) => Some(error.to_string()),
            Ok((drafting, _)) => {
                check_draft_model(&model, drafting.model(), &engine).err().map(|refused| refused.to_string())
            }
        };
        if let Ok(Some(why)) = tokio::task::spawn_blocking(look).await {
            tracing::warn!("weights.models: {draft} cannot draft for {name}: {why}");
        }
    }

    /// Resets a mapped model to the default rules; its weights stay resident while there is room.
    async fn forget(&self, name: &str) -> Result<(), JobError> {
        match self.store.owned(uid(), true, name) {
            Ok(Some(model)) => self.set_rules(&model, &ModelWeights::default()).await,
            _ => Ok(()),
        }
    }

    async fn set_rules(&self, model: &Arc<Model>, wanted: &ModelWeights) -> Result<(), JobError> {
        let change = RulesChange {
            pinned: Some(wanted.pinned),
            priority: Some(wanted.priority),
            // The part before the first layer is the embedding.
            parts_min: Some(if wanted.layers_min == 0 { 0 } else { wanted.layers_min.saturating_add(1) }),
            idle_max: Some((wanted.idle_s > 0).then(|| Duration::from_secs(wanted.idle_s.into()))),
        };
        self.engine.set_rules(model, change).await.map(drop)
    }
}

fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

async fn preload(engine: &EngineHandle, lease: &Lease, choice: &PreloadChoice) -> Result<(), JobError> {
    let what = match choice {
        PreloadChoice::Layers(count) => Preload::First(*count),
        PreloadChoice::Named(PreloadName::All) => Preload::All,
        PreloadChoice::Named(PreloadName::Critical) => Preload::Critical,
    };
    let reached = engine.preload(lease.model(), &what)?.wait().await?;
    let (tensors, bytes) = (reached.tensors, reached.bytes);
    tracing::info!(model = lease.model().name, tensors, bytes, "loaded weights as configured");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rules_that_differ_change() {
        let pinned = ModelWeights { pinned: true, ..ModelWeights::default() };
        let old = BTreeMap::from(["a", "b", "c"].map(|name| (name.to_owned(), ModelWeights::default())));
        let mut new = old.clone();
        new.remove("a");
        new.insert("b".into(), pinned.clone());
        new.insert("d".into(), ModelWeights::default());
        let wanted = [("a", None), ("b", Some(pinned)), ("d", Some(ModelWeights::default()))];
        assert_eq!(
            changes(&old, &new),
            Changes::from(wanted.map(|(name, wanted)| (name.to_owned(), wanted)))
        );
        assert!(changes(&old, &old).is_empty());
    }
}
