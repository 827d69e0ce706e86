//! Shards of split models, recognised by the names of `gguf-split`: `NAME-00001-of-00003.gguf` and so on.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::directory::{Entry, inspect, is_name};
use crate::model::files::PARTS_MAX;

/// Most missing shards listed by name; further ones are only counted.
const NAMED_MAX: usize = 4;

/// A shard's name, parsed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shard<'a> {
    /// The model's name.
    pub model: &'a str,
    /// Number of the shard, from 1.
    pub number: usize,
    /// Number of shards of the model.
    pub count: usize,
}

impl<'a> Shard<'a> {
    /// Parses a name without `.gguf`; `None` when it is not the name of a shard.
    pub fn of(name: &'a str) -> Option<Self> {
        let digits = |text: &str| {
            let plain = text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
            plain.then(|| text.parse().ok()).flatten()
        };
        let (rest, count) = name.rsplit_once("-of-")?;
        let (model, number) = rest.rsplit_once('-')?;
        let (number, count) = (digits(number)?, digits(count)?);
        let possible = (1..=count).contains(&number) && count <= PARTS_MAX && is_name(model);
        possible.then_some(Self { model, number, count })
    }
}

/// Shards in one directory, by model and count, then by number. A model has at most [`PARTS_MAX`].
#[derive(Debug, Default)]
pub(super) struct Shards(BTreeMap<(String, usize), BTreeMap<usize, PathBuf>>);

impl Shards {
    pub fn add(&mut self, shard: &Shard<'_>, path: PathBuf) {
        self.0.entry((shard.model.to_owned(), shard.count)).or_default().insert(shard.number, path);
    }

    /// One entry per model, by name. Of equal names, fewer shards come first.
    pub fn entries(self) -> impl Iterator<Item = (String, Entry)> {
        self.0.into_iter().map(|((model, count), shards)| {
            let entry = entry(&model, count, shards);
            (model, entry)
        })
    }
}

fn entry(model: &str, count: usize, shards: BTreeMap<usize, PathBuf>) -> Entry {
    let missing: Vec<usize> = (1..=count).filter(|number| !shards.contains_key(number)).collect();
    let entry = inspect(shards.into_values().collect());
    if missing.is_empty() {
        return entry;
    }
    let file = |number: &usize| format!("{model}-{number:05}-of-{count:05}.gguf");
    let names: Vec<String> = missing.iter().take(NAMED_MAX).map(file).collect();
    let more = match missing.len().saturating_sub(NAMED_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let reason = format!("{} of {count} parts are missing: {}{more}", missing.len(), names.join(", "));
    Entry { unusable: Some(reason), incomplete: true, ..entry }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts_are_told_from_others() {
        let shard = |model, number, count| Some(Shard { model, number, count });
        assert_eq!(Shard::of("qwen3-30b-00002-of-00003"), shard("qwen3-30b", 2, 3));
        assert_eq!(Shard::of("a-00001-of-00001-00001-of-00256"), shard("a-00001-of-00001", 1, 256));
        for other in [
            "a",
            "a-of-b",
            "a-1-of-2",
            "a-00000-of-00002",
            "a-00003-of-00002",
            "a-+0001-of-00002",
            "a-00001-of-00257",
            "-00001-of-00001",
            "00001-of-00001",
            "a-00001-of-00001-",
            "a-00001-of-000001",
        ] {
            assert_eq!(Shard::of(other), None, "{other}");
        }
    }

    #[test]
    fn missing_parts_are_named() {
        let mut shards = Shards::default();
        for name in ["b-00001-of-00003", "b-00003-of-00003", "c-00007-of-00256", "a-00001-of-00001"] {
            shards.add(&Shard::of(name).unwrap(), name.into());
        }
        let found: BTreeMap<String, Entry> = shards.entries().collect();
        assert!(!found["a"].incomplete);
        let why = |name: &str| found[name].unusable.as_deref().unwrap();
        assert_eq!(why("b"), "1 of 3 parts are missing: b-00002-of-00003.gguf");
        assert!(found["b"].incomplete && found["b"].paths.len() == 2);
        assert!(
            why("c").starts_with("255 of 256 parts are missing: c-00001-of-00256.gguf, "),
            "{}",
            why("c")
        );
        assert!(why("c").ends_with("c-00004-of-00256.gguf and 251 more"), "{}", why("c"));
    }
}
