//! Looks at the directories of models before a configuration is taken.

use std::path::PathBuf;
use std::time::Duration;

use crate::config::ConfigError;

/// A directory that answers no sooner is taken: its file system hangs, which is no mistake of the configuration.
const PATIENCE: Duration = Duration::from_secs(2);

/// Checks that directories can be read. May wait as long as their file systems do.
///
/// # Errors
/// [`ConfigError::Directory`] for the first that cannot.
pub fn check(directories: &[PathBuf]) -> Result<(), ConfigError> {
    let unreadable = |path: &PathBuf| std::fs::read_dir(path).err().map(|error| (path.clone(), error));
    match directories.iter().find_map(unreadable) {
        Some((path, source)) => Err(ConfigError::Directory { path, source }),
        None => Ok(()),
    }
}

/// Checks those that `old` does not have: one that was served may be away for a while, and keeps its names.
///
/// # Errors
/// As [`check`].
pub(super) async fn check_new(old: &[PathBuf], new: &[PathBuf]) -> Result<(), ConfigError> {
    let added: Vec<PathBuf> = new.iter().filter(|path| !old.contains(path)).cloned().collect();
    let look = tokio::task::spawn_blocking(move || check(&added));
    match tokio::time::timeout(PATIENCE, look).await {
        Ok(Ok(checked)) => checked,
        _ => Ok(()),
    }
}
