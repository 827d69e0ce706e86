//! Extensions for chats with tools: what a chat template sees beside roles and texts, and what clients need to read answers.

use super::{EXT_CRITICAL, GenerateItem, GenerateRequest, ShowReply, number};

/// Key of [`GenerateRequest`]'s `ext`: tools, further fields of messages, and variables of the template, as a JSON object.
pub const EXT_GENERATE_CHAT: u16 = EXT_CRITICAL | 4;

/// Key of [`GenerateRequest`]'s `ext`: marks of reasoning and of tool calls are part of the text, also if they are control
/// tokens. Its bytes mean nothing.
pub const EXT_GENERATE_MARKS: u16 = 3;

/// Key of [`GenerateItem`]'s `ext`, in the first item only: 1 if the prompt ends with the begin mark of a reasoning.
pub const EXT_ITEM_REASONING: u16 = 1;

/// Key of [`ShowReply`]'s `ext`: the form in which the model writes tool calls, as text.
pub const EXT_SHOW_CALLS: u16 = 4;
/// Key of [`ShowReply`]'s `ext`: name of the template's variable that turns reasoning on and off.
pub const EXT_SHOW_THINKING: u16 = 5;
/// Names of that variable. The first two are true or false, the last is `low`, `medium` or `high`.
pub const THINKING_VARIABLES: [&str; 3] = ["enable_thinking", "thinking", "reasoning_effort"];

/// Bytes that are no chat's tools, fields and variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("tools, fields and variables of a chat are a JSON object in UTF-8")]
pub struct BadChatExtras;

impl GenerateRequest {
    /// The same request, whose chat template sees the values of this JSON object too, as `PROTOCOL.md` has it.
    #[must_use]
    pub fn with_chat_extras(mut self, json: &str) -> Self {
        self.ext.retain(|(key, _)| *key != EXT_GENERATE_CHAT);
        self.ext.push((EXT_GENERATE_CHAT, json.as_bytes().to_vec()));
        self
    }

    /// The JSON object of tools, fields and variables, if the request has one.
    ///
    /// # Errors
    /// [`BadChatExtras`] for bytes that are not UTF-8. Whether they are JSON is not checked.
    pub fn chat_extras(&self) -> Result<Option<&str>, BadChatExtras> {
        let bytes = self.ext.iter().find(|(key, _)| *key == EXT_GENERATE_CHAT);
        bytes.map(|(_, bytes)| std::str::from_utf8(bytes).map_err(|_| BadChatExtras)).transpose()
    }

    /// The same request, whose text has the marks of reasoning and of tool calls, also if they are control tokens.
    #[must_use]
    pub fn with_marks(mut self) -> Self {
        if !self.marks() {
            self.ext.push((EXT_GENERATE_MARKS, Vec::new()));
        }
        self
    }

    /// Whether marks of reasoning and of tool calls are part of the text.
    pub fn marks(&self) -> bool {
        self.ext.iter().any(|(key, _)| *key == EXT_GENERATE_MARKS)
    }
}

impl GenerateItem {
    /// Whether the prompt ends with the begin mark of a reasoning, so that the answer begins inside one. Only the first item
    /// says it.
    pub fn begins_in_reasoning(&self) -> bool {
        number(&self.ext, EXT_ITEM_REASONING) == Some(1)
    }
}

impl ShowReply {
    /// Name of the form in which the model writes tool calls; `None` if the daemon does not say.
    pub fn calls(&self) -> Option<&str> {
        let (_, bytes) = self.ext.iter().find(|(key, _)| *key == EXT_SHOW_CALLS)?;
        std::str::from_utf8(bytes).ok()
    }

    /// Name of the template's variable that turns reasoning on and off; `None` if the daemon knows of none.
    pub fn thinking(&self) -> Option<&str> {
        let (_, bytes) = self.ext.iter().find(|(key, _)| *key == EXT_SHOW_THINKING)?;
        std::str::from_utf8(bytes).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Prompt, Validate, Violation, limits};

    #[test]
    fn extras_and_marks_are_read_as_they_were_written() {
        let request = || GenerateRequest::new("m", Prompt::Chat(vec![]));
        let asked =
            request().with_marks().with_marks().with_chat_extras("{}").with_chat_extras(r#"{"tools":[]}"#);
        assert_eq!((asked.chat_extras(), asked.marks()), (Ok(Some(r#"{"tools":[]}"#)), true));
        assert_eq!(asked.validate(), Ok(()));
        assert_eq!((request().chat_extras(), request().marks()), (Ok(None), false));
        let mut bad = request();
        bad.ext.push((EXT_GENERATE_CHAT, vec![0xff]));
        assert_eq!(bad.chat_extras(), Err(BadChatExtras));
        let of = |bytes| request().with_chat_extras(&" ".repeat(bytes)).validate();
        assert_eq!(of(limits::CHAT_EXTRAS_BYTES_MAX), Ok(()));
        assert!(matches!(of(limits::CHAT_EXTRAS_BYTES_MAX + 1), Err(Violation::TooLong { .. })));
    }
}
