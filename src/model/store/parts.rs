//! Parts of split models, recognised by the names of `gguf-split`: `NAME-00001-of-00003.gguf` and so on.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::directory::{Entry, inspect, is_name};
use crate::model::files::PARTS_MAX;

/// Most missing parts listed by name; further ones are only counted.
const NAMED_MAX: usize = 4;

/// A part's name, parsed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Part<'a> {
    /// The model's name.
    pub model: &'a str,
    /// Number of the part, from 1.
    pub number: usize,
    /// Number of parts of the model.
    pub count: usize,
}

impl<'a> Part<'a> {
    /// Parses a name without `.gguf`; `None` when it is not the name of a part.
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

/// Parts in one directory, by model and count, then by number. A model has at most [`PARTS_MAX`].
#[derive(Debug, Default)]
pub(super) struct Parts(BTreeMap<(String, usize), BTreeMap<usize, PathBuf>>);

impl Parts {
    pub fn add(&mut self, part: &Part<'_>, path: PathBuf) {
        self.0.entry((part.model.to_owned(), part.count)).or_default().insert(part.number, path);
    }

    /// Number of models.
    pub fn models(&self) -> usize {
        self.0.len()
    }

    /// One entry per model, by name. Of equal names, fewer parts come first.
    pub fn entries(self) -> impl Iterator<Item = (String, Entry)> {
        self.0.into_iter().map(|((model, count), parts)| {
            let entry = entry(&model, count, parts);
            (model, entry)
        })
    }
}

fn entry(model: &str, count: usize, parts: BTreeMap<usize, PathBuf>) -> Entry {
    let missing: Vec<usize> = (1..=count).filter(|number| !parts.contains_key(number)).collect();
    let entry = inspect(parts.into_values().collect());
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
        let part = |model, number, count| Some(Part { model, number, count });
        assert_eq!(Part::of("qwen3-30b-00002-of-00003"), part("qwen3-30b", 2, 3));
        assert_eq!(Part::of("a-00001-of-00001-00001-of-00256"), part("a-00001-of-00001", 1, 256));
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
            assert_eq!(Part::of(other), None, "{other}");
        }
    }

    #[test]
    fn missing_parts_are_named() {
        let mut parts = Parts::default();
        for name in ["b-00001-of-00003", "b-00003-of-00003", "c-00007-of-00256", "a-00001-of-00001"] {
            parts.add(&Part::of(name).unwrap(), name.into());
        }
        assert_eq!(parts.models(), 3);
        let found: BTreeMap<String, Entry> = parts.entries().collect();
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
