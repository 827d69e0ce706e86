//! Suggestions for names that do not exist: models, and commands that other programs have.

use rocmforge_client::wire::ErrorCode;
use rocmforge_client::{Client, ClientError};

use super::report::Failure;

/// Commands of other programs, and what to do here instead.
const ELSEWHERE: [(&str, &str); 8] = [
    ("serve", "the daemon is a program of its own: run `rocmforged`, or `systemctl start rocmforged.socket`"),
    (
        "start",
        "the daemon starts with the first request: `systemctl enable --now rocmforged.socket`, or run `rocmforged`",
    ),
    (
        "stop",
        "to unmap a model: `rocmforge-client unload MODEL`; to stop the daemon: `systemctl stop rocmforged`",
    ),
    (
        "rm",
        "models are files of the daemon's models directory: remove the file there; `rocmforge-client unload MODEL` unmaps it",
    ),
    (
        "create",
        "models are files: put the GGUF file into the models directory, or pass it with `rocmforge-client load FILE`",
    ),
    ("ls", "`rocmforge-client list` shows the models"),
    ("models", "`rocmforge-client list` shows the models"),
    ("generate", "`rocmforge-client run MODEL TEXT` generates text, `rocmforge-client chat MODEL` chats"),
];

/// Advice for a command that only other programs have.
pub fn elsewhere(command: &str) -> Option<&'static str> {
    ELSEWHERE.into_iter().find(|(name, _)| *name == command).map(|(_, advice)| advice)
}

/// The failure, which names a model of a near name if the model does not exist. Asks the daemon for its models.
pub fn with_near_model(client: &Client, model: Option<&str>, failure: Failure) -> Failure {
    let mut error = match failure {
        Failure::Client(error) => *error,
        other => return other,
    };
    if let Some(model) = model
        && let ClientError::Server(of_daemon) = &mut error
        && of_daemon.code == ErrorCode::ModelNotFound as u16
        && let Ok(list) = client.list()
        && let Some(near) = nearest(model, list.models.iter().map(|model| model.name.as_str()))
    {
        of_daemon.message = format!("{}; did you mean {near}?", of_daemon.message);
    }
    Failure::Client(Box::new(error))
}

/// Least letters of which an existing name's beginning may differ: with fewer, all names would be near.
const BEGINNING_LEAST: usize = 4;

/// Most names of a suggestion.
const NAMES_MOST: usize = 3;

/// The names that `wanted` may stand for, as a list in words: those that begin so, else the nearest by a few letters. If none is near,
/// those whose beginning is. Case and `.gguf` do not matter.
pub fn nearest<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Option<String> {
    let plain = |name: &str| {
        let name = name.to_lowercase();
        name.strip_suffix(".gguf").map(str::to_owned).unwrap_or(name)
    };
    let wanted = plain(wanted);
    if wanted.is_empty() || wanted.len() > 255 {
        return None;
    }
    let names = names.filter(|name| name.len() <= 255);
    let mut distances: Vec<Distance<'_>> =
        names.map(|name| Distance::of(&wanted, name, &plain(name))).collect();
    distances.sort_unstable_by_key(|d| d.name);
    let of_beginning = |distance: usize| {
        let names: Vec<&str> = distances.iter().filter(|d| d.begin == distance).map(|d| d.name).collect();
        (!names.is_empty()).then(|| one_of(&names))
    };
    if let Some(names) = of_beginning(0) {
        return Some(names);
    }
    let letters = wanted.chars().count();
    let most = (letters / 4).clamp(1, 3);
    let nearest = distances.iter().filter(|d| d.whole <= most).min_by_key(|d| (d.whole, d.name));
    if let Some(nearest) = nearest {
        return Some(nearest.name.to_owned());
    }
    let least = distances.iter().map(|d| d.begin).min().filter(|least| *least <= most);
    least.filter(|_| letters >= BEGINNING_LEAST).and_then(of_beginning)
}

/// A name that was given, compared with one that exists.
struct Distance<'a> {
    name: &'a str,
    whole: usize,
    /// That to the beginning of the name which is nearest.
    begin: usize,
}

impl<'a> Distance<'a> {
    fn of(wanted: &str, name: &'a str, plain: &str) -> Self {
        let row = distances(wanted, plain);
        let last = |row: &[usize]| row.last().copied().unwrap_or(0);
        Self { name, whole: last(&row), begin: row.iter().copied().min().unwrap_or(0) }
    }
}

/// "a", "a or b", "a, b or c", "a, b, c or another".
fn one_of(names: &[&str]) -> String {
    let (shown, last) = match names {
        [shown @ .., last] if names.len() <= NAMES_MOST => (shown, *last),
        _ => (names.get(..NAMES_MOST).unwrap_or(names), "another"),
    };
    if shown.is_empty() { last.to_owned() } else { format!("{} or {last}", shown.join(", ")) }
}

/// For each beginning of `b`, the empty one first, the letters of `a` that must be added, removed, changed, or swapped with the next.
fn distances(a: &str, b: &str) -> Vec<usize> {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for i in 0..a.len() {
        let mut next = vec![i + 1];
        for j in 0..b.len() {
            let changed = row[j] + usize::from(a[i] != b[j]);
            let mut best = changed.min(row[j + 1] + 1).min(next[j] + 1);
            if i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j] {
                best = best.min(before[j - 1] + 1);
            }
            next.push(best);
        }
        before = std::mem::replace(&mut row, next);
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_name_is_found_and_a_far_one_is_not() {
        let names = ["smollm2-135m-instruct-q4_1", "Qwen3-8B", "qwen3-14b", "story"];
        let near = |wanted| nearest(wanted, names.into_iter()).unwrap_or_default();
        assert_eq!(near("SmolLM2"), "smollm2-135m-instruct-q4_1");
        assert_eq!(near("qwen3-8b.gguf"), "Qwen3-8B");
        assert_eq!(near("qwen3"), "Qwen3-8B or qwen3-14b");
        assert_eq!([near("stroy"), near("sotyr")], ["story", ""], "one letter in four");
        assert_eq!(near("stry"), "story");
        assert_eq!(near("qwen3-14c"), "qwen3-14b");
        assert_eq!([near(""), near("llama")], ["", ""]);
        assert_eq!(one_of(&["a", "b", "c"]), "a, b or c");
        assert_eq!(one_of(&["a", "b", "c", "d"]), "a, b, c or another");
        assert_eq!(
            [near("smolm"), near("qwne3"), near("smo1")],
            ["smollm2-135m-instruct-q4_1", "Qwen3-8B or qwen3-14b", "smollm2-135m-instruct-q4_1"]
        );
        assert_eq!([near("x"), near("xyz")], ["", ""]);
        let distance = |a, b| Distance::of(a, b, b).whole;
        assert_eq!((distance("kitten", "sitting"), distance("", "ab"), distance("é", "e")), (3, 2, 1));
    }
}
