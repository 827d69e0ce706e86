//! Looks at the directories of models, and at the models in them, before a configuration is taken.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::keep::Keep;
use crate::aside::{Aside, Limits, Subject};
use crate::backend::BackendError;
use crate::config::{Config, ConfigError};
use crate::model::Model;
use crate::model::store::{OpenError, Store, Survey};
use crate::model::tokenizer::Tokenizers;
use crate::program::Program;

/// A directory that answers no sooner is taken: its file system hangs, which is no mistake of the configuration.
const PATIENCE: Duration = Duration::from_secs(2);

/// Longest look at the models before a reload. With warm caches, that is enough for hundreds.
pub(super) const RELOAD_PATIENCE: Duration = Duration::from_secs(5);

/// Longest look at the models for `--check-config`.
pub const CHECK_PATIENCE: Duration = Duration::from_secs(30);

/// Most names in one warning, and most warnings about single files.
const TOLD_MAX: usize = 32;

/// Names what a device cannot compute of a program.
pub type Refuses = Box<dyn Fn(&Program) -> Option<BackendError> + Send + Sync>;

/// Checks that directories can be read. Waits 2 s at most.
///
/// # Errors
/// [`ConfigError::Directory`] for the first that cannot.
pub fn check(directories: &[PathBuf]) -> Result<(), ConfigError> {
    let directories = directories.to_vec();
    let unreadable = |path: &PathBuf| std::fs::read_dir(path).err().map(|error| (path.clone(), error));
    match within(PATIENCE, move || directories.iter().find_map(unreadable)).flatten() {
        Some((path, source)) => Err(ConfigError::Directory { path, source }),
        None => Ok(()),
    }
}

/// Checks those that `old` does not have: one that was served may be away for a while, and keeps its names.
///
/// # Errors
/// As [`check`].
pub(super) fn check_new(old: &[PathBuf], new: &[PathBuf]) -> Result<(), ConfigError> {
    let added: Vec<PathBuf> = new.iter().filter(|path| !old.contains(path)).cloned().collect();
    check(&added)
}

/// Looks at the models of the directories for so long at most. Their headers are read, and no weights. `None` if a disk keeps
/// the look for longer.
pub fn survey(directories: &[PathBuf], patience: Duration, refuses: Refuses) -> Option<Survey> {
    let tokenizers = Tokenizers::default();
    let open = move |id, name: &str, files, charge| {
        let model = Model::open_beside(id, name, files, &tokenizers, charge)?;
        (refuses)(&model.plan.program).map_or(Ok(model), |refusal| Err(OpenError::from(refusal)))
    };
    let store = Store::new(directories.to_vec(), Arc::default(), Box::new(open), Box::new(|_| ()));
    let until = Instant::now() + patience;
    within(patience + PATIENCE, move || store.survey(until))
}

/// The result of work on a thread of its own, which is lost if it takes longer.
fn within<T: Send + 'static>(patience: Duration, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let subject = Subject { what: "looking at the models", name: String::new(), device: None };
    let aside = Aside::new(Limits { patience, ..Limits::default() });
    aside.run(subject, move |errand| errand.answer(work())).ok()
}

/// The models that a configuration would not serve, one text for each fault.
///
/// # Errors
/// [`ConfigError::NothingServed`] if its directories have models, and none of them would be served.
pub fn judge(config: &Config, survey: Option<&Survey>) -> Result<Vec<String>, ConfigError> {
    let Some(Survey { served, unserved, unseen }) = survey else {
        return Ok(vec!["the models were not looked at: their disks did not answer in time".to_owned()]);
    };
    if let Some(first) = unserved.first().filter(|_| served.is_empty() && unseen.is_empty()) {
        let (found, path, reason) = (unserved.len(), first.path.clone(), first.reason.clone());
        return Err(ConfigError::NothingServed { found, path, reason });
    }
    let mut warnings: Vec<String> = unserved.iter().take(TOLD_MAX).map(ToString::to_string).collect();
    if let Some(more @ 1..) = unserved.len().checked_sub(TOLD_MAX) {
        warnings.push(format!("{more} more models would not be served"));
    }
    if !unseen.is_empty() {
        let names: Vec<&str> = unseen.iter().take(TOLD_MAX).map(String::as_str).collect();
        warnings.push(format!(
            "{} models were not looked at, for want of time or memory, or as the server of their file system may hang: {}",
            unseen.len(),
            names.join(", ")
        ));
    }
    if served.is_empty() && unserved.is_empty() && unseen.is_empty() {
        warnings.push(match config.models.is_empty() {
            true => "no directory of models is named (models, or --models): only models that clients pass are served".to_owned(),
            false => "no directory has a model yet: put *.gguf files there".to_owned(),
        });
    }
    let found = |name: &String| {
        served.contains(name) || unseen.contains(name) || unserved.iter().any(|model| model.name == *name)
    };
    let of_host = config.host.models.keys().map(|name| ("host.models", name));
    let weights = &config.weights.models;
    let drafting = weights.values().filter_map(|of| of.draft.as_ref());
    let of_weights = weights.keys().chain(drafting).map(|name| ("weights.models", name));
    let missing = of_host.chain(of_weights).filter(|(_, name)| !found(name)).take(TOLD_MAX);
    warnings
        .extend(missing.map(|(key, name)| format!("{key} names {name:?}, and no directory has that model")));
    if Keep::of(config).is_err() {
        warnings.push(
            "kv.keep_mib is set and kv.keep_dir is not: only systemd names a folder, so the daemon would start under it alone"
                .to_owned(),
        );
    }
    Ok(warnings)
}
