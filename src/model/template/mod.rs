//! Chat templates: Jinja from the model file, rendered in a separate process with hard limits.
//!
//! A template is an untrusted program. Counting its steps bounds neither memory nor time: 130 bytes of template can ask
//! for gigabytes in one step. So it runs where the kernel counts. The daemon starts its own program again as
//! `rocmforged render-template`. That process limits its memory, processor time and files, reads one request from
//! standard input and writes the text to standard output. In every case, the daemon gets the text or a typed error.
//!
//! Templates have the features that transformers gives them (`utils/chat_template_utils.py`).

pub(in crate::model) mod child;
mod environment;
mod error;
pub(in crate::model) mod renderer;
mod time;
mod tojson;

pub use child::child_main;
pub use environment::render_unconfined;
pub use error::TemplateError;
pub use renderer::Renderer;

use serde::{Deserialize, Serialize};

/// First argument that makes `rocmforged` call [`child_main`].
pub const SUBCOMMAND: &str = "render-template";

/// Longest template in bytes. The longest in use have 20 KiB.
pub const SOURCE_BYTES_MAX: usize = 256 << 10;

/// Longest request in bytes of JSON. A protocol frame is 1 MiB, and each of its bytes takes up to 6 bytes of JSON.
pub const REQUEST_BYTES_MAX: usize = 8 << 20;

/// Longest rendered text in bytes.
pub const OUTPUT_BYTES_MAX: usize = 1 << 20;

/// Address space of the rendering process, in MiB.
pub const MEMORY_MIB_MAX: u64 = 256;

/// Processor time of the rendering process, in seconds.
pub const CPU_SECONDS_MAX: u64 = 2;

/// A request to render a template.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TemplateRequest {
    /// Jinja source, `tokenizer.chat_template` of the file.
    pub template: String,
    /// The conversation, `messages` of the template.
    pub messages: Vec<Message>,
    /// `tools` of the template, each a JSON schema of a function; `none` when empty.
    pub tools: Vec<serde_json::Value>,
    /// True to end the text with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// Text of the beginning-of-sequence token; undefined in the template when there is none.
    pub bos_token: Option<String>,
    /// Text of the end-of-sequence token.
    pub eos_token: Option<String>,
    /// Further variables, such as `enable_thinking`.
    pub variables: serde_json::Map<String, serde_json::Value>,
    /// Time for `strftime_now`: seconds since 1970, UTC.
    pub now_unix_s: i64,
}

/// A task of the rendering process. The daemon writes references, and the process reads values.
#[derive(Debug, Serialize, Deserialize)]
enum Task<R, T> {
    /// For the text of a conversation.
    Render(R),
    /// For the first of `variables` that `template` reads before it sets it; an empty text if there is none.
    Find { template: T, variables: Vec<T> },
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`; the template decides which it supports.
    pub role: String,
    /// Text of the message; `None` for a message of tool calls alone.
    pub content: Option<String>,
    /// Further fields, such as `tool_calls`.
    #[serde(flatten)]
    pub fields: serde_json::Map<String, serde_json::Value>,
}

impl TemplateRequest {
    /// A request for a prompt that continues `messages` with an answer, at the current time.
    pub fn new(template: impl Into<String>, messages: Vec<Message>) -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self {
            template: template.into(),
            messages,
            tools: Vec::new(),
            add_generation_prompt: true,
            bos_token: None,
            eos_token: None,
            variables: serde_json::Map::new(),
            now_unix_s: now.map_or(0, |since| since.as_secs().cast_signed()),
        }
    }

    /// Adds the special tokens of a vocabulary.
    #[must_use]
    pub fn with_tokens_of(mut self, tokenizer: &super::tokenizer::Tokenizer) -> Self {
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id)).map(str::to_owned);
        (self.bos_token, self.eos_token) = (text(tokenizer.bos()), text(tokenizer.eos()));
        self
    }
}

impl Message {
    /// A message of text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: Some(content.into()), fields: serde_json::Map::new() }
    }
}
