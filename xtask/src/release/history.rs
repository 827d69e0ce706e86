//! The repository's history: the last commit, and changes by version.

use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

use crate::error::{Error, Result};
use crate::host;

/// The commit that packages are made of.
#[derive(Clone, Debug)]
pub struct Commit {
    pub id: String,
    /// Seconds since 1970; the time of every packaged file.
    pub time: u64,
}

/// A version, its commit's time, and its changes, newest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub version: String,
    pub time: u64,
    pub changes: Vec<String>,
}

fn git(root: &Path, words: &[&str]) -> Result<String> {
    let mut command = Command::new("git");
    command.arg("-C").arg(root).args(words);
    host::read(&mut command).map(|text| text.trim_end().to_owned())
}

/// The last commit of the repository in `root`. Sources without a repository have a time alone: that of
/// `SOURCE_DATE_EPOCH`, or of their manifest.
///
/// # Errors
/// There is no git, or it cannot read the repository.
pub fn last(root: &Path) -> Result<Commit> {
    if !has_history(root) {
        return Ok(Commit { id: "sources without a history".to_owned(), time: time_of_sources(root)? });
    }
    host::ensure("git", "git")?;
    let text = git(root, &["log", "-1", "--format=%H %ct"])?;
    let parsed = text.split_once(' ').and_then(|(id, time)| Some((id.to_owned(), time.parse().ok()?)));
    let (id, time) = parsed.ok_or(Error::Unexpected { what: "git log", text })?;
    Ok(Commit { id, time })
}

fn has_history(root: &Path) -> bool {
    root.join(".git").exists()
}

fn time_of_sources(root: &Path) -> Result<u64> {
    if let Some(time) = std::env::var("SOURCE_DATE_EPOCH").ok().and_then(|time| time.parse().ok()) {
        return Ok(time);
    }
    let path = root.join("Cargo.toml");
    let changed = std::fs::metadata(&path).and_then(|meta| meta.modified()).map_err(Error::at(&path))?;
    Ok(changed.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs())
}

/// Refuses a tree with changes: its packages would be of no commit.
///
/// # Errors
/// [`Error::Unexpected`], with the first changed files.
pub fn check_clean(root: &Path) -> Result<()> {
    if !has_history(root) {
        return Ok(());
    }
    let changed = git(root, &["status", "--porcelain"])?;
    if changed.is_empty() {
        return Ok(());
    }
    let shown: Vec<&str> = changed.lines().take(5).map(str::trim).collect();
    let text = format!(
        "{} files have changes that no commit has ({}): commit them, or package them with --allow-dirty",
        changed.lines().count(),
        shown.join(", ")
    );
    Err(Error::Unexpected { what: "the working tree", text })
}

/// Changes by version, the newest first: those since the tag of an earlier version belong to `version`.
///
/// # Errors
/// As [`last`].
pub fn entries(root: &Path, version: &str, last: &Commit) -> Result<Vec<Entry>> {
    if !has_history(root) {
        let changes = vec!["These sources came without their history".to_owned()];
        return Ok(vec![Entry { version: version.to_owned(), time: last.time, changes }]);
    }
    let tags = git(root, &["tag", "--merged", "HEAD", "--list", "v*", "--sort=-version:refname"])?;
    let earlier = tags.lines().filter(|tag| *tag != format!("v{version}"));
    let ends = std::iter::once("HEAD").chain(earlier.clone());
    let begins = earlier.map(Some).chain([None]);
    ends.zip(begins)
        .map(|(end, begin)| {
            let range = begin.map_or_else(|| end.to_owned(), |begin| format!("{begin}..{end}"));
            let changes = git(root, &["log", "--no-merges", "--format=%s", &range])?;
            let time = git(root, &["log", "-1", "--format=%ct", end])?;
            Ok(Entry {
                version: end.strip_prefix('v').unwrap_or(version).to_owned(),
                time: time.parse().map_err(|_| Error::Unexpected { what: "git log", text: time })?,
                changes: changes.lines().map(str::to_owned).collect(),
            })
        })
        .collect()
}
