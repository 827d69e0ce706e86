//! The APIs, and how a path says which one it belongs to.

use std::borrow::Cow;

/// An API, which decides the form of answers and errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Api {
    /// OpenAI's.
    OpenAi,
    /// Anthropic's.
    Anthropic,
    /// Ollama's.
    Ollama,
    /// The gateway's own pages; errors have OpenAI's form.
    Own,
}

/// OpenAI's path with its `/v1`: clients whose base address lacks it leave it out.
pub fn whole(path: &str) -> Cow<'_, str> {
    match path {
        "/chat/completions" | "/completions" | "/embeddings" | "/models" | "/responses" => {
            format!("/v1{path}").into()
        }
        _ => path.into(),
    }
}

impl Api {
    /// The API of a whole path.
    pub fn of(path: &str) -> Self {
        let below =
            |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        match () {
            () if below("/v1/messages") => Self::Anthropic,
            () if below("/v1") => Self::OpenAi,
            () if below("/api") => Self::Ollama,
            () => Self::Own,
        }
    }

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::OpenAi => "openai",
            Self::Anthropic => "anthropic",
            Self::Ollama => "ollama",
            Self::Own => "gateway",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_belongs_to_one_api() {
        let cases = [
            ("/v1/chat/completions", Api::OpenAi),
            ("/chat/completions", Api::OpenAi),
            ("/models", Api::OpenAi),
            ("/v1/messages", Api::Anthropic),
            ("/v1/messages/count_tokens", Api::Anthropic),
            ("/v1/messagesmore", Api::OpenAi),
            ("/api/chat", Api::Ollama),
            ("/apis", Api::Own),
            ("/health", Api::Own),
            ("/", Api::Own),
        ];
        for (path, api) in cases {
            assert_eq!(Api::of(&whole(path)), api, "{path}");
        }
    }
}
