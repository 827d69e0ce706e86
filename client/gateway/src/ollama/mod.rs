//! Ollama's API: chats and texts in lines of JSON, and its lists of models.

mod embed;
mod generate;
mod models;
mod options;

pub use embed::{embed, embeddings};
pub use generate::{chat, generate};
pub use models::{ps, show, tags, version};

use crate::failure::Failure;

/// The refusal of a path that needs an ability which the daemon lacks on purpose.
pub fn refusal(path: &str) -> Option<Failure> {
    let reason = match path {
        "/api/pull" | "/api/push" => {
            "the daemon has no network: put the GGUF file into its models directory, or pass it with \
             `rocmforge-client load FILE`"
        }
        "/api/create" | "/api/copy" | "/api/delete" => {
            "models are files of the daemon's models directory: change them there"
        }
        _ => return None,
    };
    Some(Failure::new(501, reason))
}

/// A model's name without the tag that Ollama's clients add to a name without one.
pub fn untagged(name: &str) -> &str {
    name.strip_suffix(":latest").unwrap_or(name)
}
