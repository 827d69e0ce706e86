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

/// The name that `wanted` may stand for. It is the only one that begins so, or the nearest by a few letters. Case and `.gguf` do not
/// matter.
pub fn nearest<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |name: &str| {
        let name = name.to_lowercase();
        name.strip_suffix(".gguf").map(str::to_owned).unwrap_or(name)
    };
    let wanted = plain(wanted);
    let names: Vec<&str> = names.filter(|name| name.len() <= 255).collect();
    if wanted.is_empty() || wanted.len() > 255 {
        return None;
    }
    let begin: Vec<&str> = names.iter().copied().filter(|name| plain(name).starts_with(&wanted)).collect();
    if let [only] = begin.as_slice() {
        return Some(only);
    }
    let most = (wanted.chars().count() / 4).clamp(1, 3);
    let distances = names.iter().map(|name| (distance(&wanted, &plain(name)), *name));
    distances.filter(|(distance, _)| *distance <= most).min().map(|(_, name)| name)
}

/// Letters that must be added, removed, changed, or swapped with the next.
fn distance(a: &str, b: &str) -> usize {
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
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_name_is_found_and_a_far_one_is_not() {
        let names = ["smollm2-135m-instruct-q4_1", "Qwen3-8B", "qwen3-14b", "story"];
        let near = |wanted| nearest(wanted, names.into_iter());
        assert_eq!(near("SmolLM2"), Some("smollm2-135m-instruct-q4_1"));
        assert_eq!(near("qwen3-8b.gguf"), Some("Qwen3-8B"));
        assert_eq!(near("qwen3"), None, "two begin so");
        assert_eq!((near("stroy"), near("sotyr")), (Some("story"), None), "one letter in four");
        assert_eq!(near("stry"), Some("story"));
        assert_eq!(near("qwen3-14c"), Some("qwen3-14b"));
        assert_eq!((near(""), near("llama")), (None, None));
        assert_eq!((distance("kitten", "sitting"), distance("", "ab"), distance("é", "e")), (3, 2, 1));
    }
}
