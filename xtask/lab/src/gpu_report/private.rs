//! Removes private data from the report: names of persons, machines and folders.

use std::env;
use std::path::Path;

use serde_json::Value;
use xtask::host;

use super::page::Page;

/// Shorter names are not replaced: they would match parts of other words.
const NAME_MIN: usize = 3;

/// Names that identify no one.
const COMMON: [&str; 6] = ["root", "user", "admin", "localhost", "amd", "gpu"];

/// Texts to replace and their replacements, in this order.
#[derive(Debug)]
pub struct Private {
    paths: Vec<(String, &'static str)>,
    words: Vec<(String, &'static str)>,
}

impl Private {
    /// The private names of this process's user and machine.
    pub fn here() -> Self {
        let node = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let var = |name: &str| env::var(name).unwrap_or_default();
        Self::of(host::root(), &var("HOME"), &[var("USER"), var("LOGNAME")], &node)
    }

    fn of(sources: &Path, home: &str, users: &[String], machine: &str) -> Self {
        let is_path = |path: &str| path.len() > NAME_MIN && path.starts_with('/');
        let paths = [(sources.display().to_string(), "SOURCES"), (home.to_owned(), "HOME")];
        let short = machine.split('.').next().unwrap_or_default().to_owned();
        let machines = [(machine.to_owned(), "MACHINE"), (short, "MACHINE")];
        let words = users.iter().map(|user| (user.clone(), "USER")).chain(machines);
        Self {
            paths: paths.into_iter().filter(|(path, _)| is_path(path)).collect(),
            words: words
                .filter(|(word, _)| word.len() >= NAME_MIN && !COMMON.contains(&word.as_str()))
                .collect(),
        }
    }

    /// Replaces all private names in the page.
    pub fn strip(&self, page: &mut Page) {
        page.facts.iter_mut().for_each(|(_, value)| self.strip_text(value));
        for check in &mut page.findings.checks {
            self.strip_text(&mut check.found);
            self.strip_text(&mut check.advice);
        }
        for outcome in &mut page.outcomes {
            // The name of a given file; its owner chose it.
            self.strip_text(&mut outcome.name);
            self.strip_text(&mut outcome.note);
            self.strip_text(&mut outcome.output);
            outcome.skipped.iter_mut().for_each(|why| self.strip_text(why));
            outcome.measured.iter_mut().for_each(|value| self.strip_value(value));
        }
    }

    fn strip_value(&self, value: &mut Value) {
        match value {
            Value::String(text) => self.strip_text(text),
            Value::Array(values) => values.iter_mut().for_each(|value| self.strip_value(value)),
            Value::Object(map) => map.values_mut().for_each(|value| self.strip_value(value)),
            _ => {}
        }
    }

    fn strip_text(&self, text: &mut String) {
        for (path, name) in &self.paths {
            *text = text.replace(path.as_str(), name);
        }
        for (word, name) in &self.words {
            *text = replace_word(text, word, name);
        }
    }
}

/// Replaces `word` where it is not part of a longer word.
fn replace_word(text: &str, word: &str, by: &str) -> String {
    let is_part = |c: char| c.is_alphanumeric();
    let mut replaced = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(word) {
        let (before, after) = (&rest[..at], &rest[at + word.len()..]);
        let alone =
            !before.chars().next_back().is_some_and(is_part) && !after.chars().next().is_some_and(is_part);
        replaced.push_str(before);
        replaced.push_str(if alone { by } else { word });
        rest = after;
    }
    replaced + rest
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn names_and_folders_are_replaced_and_other_words_are_not() {
        let users = ["anna".to_owned(), "root".into(), String::new()];
        let private = Private::of(Path::new("/home/anna/src/forge"), "/home/anna", &users, "deb.example.org");
        for (text, want) in [
            ("/home/anna/src/forge/target/x.so", "SOURCES/target/x.so"),
            ("/home/anna/.cache: anna@deb.example.org", "HOME/.cache: USER@MACHINE"),
            ("deb anna-deb annapurna debian root", "MACHINE USER-MACHINE annapurna debian root"),
            ("nothing", "nothing"),
        ] {
            let mut text = text.to_owned();
            private.strip_text(&mut text);
            assert_eq!(text, want);
        }
        let mut value = serde_json::json!({ "a": ["at deb", 1], "anna": { "b": "anna" } });
        private.strip_value(&mut value);
        assert_eq!(value, serde_json::json!({ "a": ["at MACHINE", 1], "anna": { "b": "USER" } }));
        // With a home of "/" and no names, nothing changes.
        let nobody = Private::of(Path::new("/"), "/", &[], "");
        let mut text = "/dev/kfd".to_owned();
        nobody.strip_text(&mut text);
        assert_eq!(text, "/dev/kfd");
    }
}
