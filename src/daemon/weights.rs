//! Weights that the configuration wants on the device from the start on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::config::{ModelWeights, PreloadChoice, PreloadName};
use crate::model::store::Store;
use crate::scheduler::{EngineHandle, JobError, Preload, RulesChange};

/// Sets the rules of these models and brings what is wanted of them, one after the other. Clients are answered meanwhile; what
/// cannot be had is a warning.
///
/// Models that are `ruled` keep the rules that they had before a restart.
pub(super) async fn bring(
    store: Arc<Store>,
    engine: EngineHandle,
    wanted: BTreeMap<String, ModelWeights>,
    ruled: &BTreeSet<String>,
) {
    let uid = rustix::process::geteuid().as_raw();
    for (name, wanted) in wanted {
        let (acquiring, asked) = (Arc::clone(&store), name.clone());
        let lease = match tokio::task::spawn_blocking(move || acquiring.acquire(uid, &asked)).await {
            Ok(Ok((lease, _))) => lease,
            Ok(Err(error)) => {
                tracing::warn!("{name} is named in weights.models and not there: {error}");
                continue;
            }
            Err(_) => return, // the daemon ends
        };
        let change = RulesChange {
            pinned: Some(wanted.pinned),
            priority: Some(wanted.priority),
            // The part before the first layer is the embedding.
            parts_min: Some(if wanted.layers_min == 0 { 0 } else { wanted.layers_min.saturating_add(1) }),
            idle_max: Some((wanted.idle_s > 0).then(|| Duration::from_secs(wanted.idle_s.into()))),
        };
        let set = if ruled.contains(&name) {
            Ok(())
        } else {
            engine.set_rules(lease.model(), change).await.map(drop)
        };
        let brought = match (set, wanted.preload) {
            (Ok(()), Some(choice)) => preload(&engine, &lease, choice).await,
            (set, _) => set,
        };
        if let Err(error) = brought {
            tracing::warn!("weights of {name}, as weights.models wants them: {error}");
        }
    }
}

async fn preload(
    engine: &EngineHandle,
    lease: &crate::model::store::Lease,
    choice: PreloadChoice,
) -> Result<(), JobError> {
    let what = match choice {
        PreloadChoice::Layers(count) => Preload::First(count),
        PreloadChoice::Named(PreloadName::All) => Preload::All,
        PreloadChoice::Named(PreloadName::Critical) => Preload::Critical,
    };
    let reached = engine.preload(lease.model(), &what)?.wait().await?;
    let (tensors, bytes) = (reached.tensors, reached.bytes);
    tracing::info!(model = lease.model().name, tensors, bytes, "weights brought at start");
    Ok(())
}
