//! Marks of reasoning and of tool calls, which some vocabularies have as control tokens.

use super::{EncodeOptions, TokenKind, Tokenizer};

/// The marks of the model families whose tool calls clients read. Those that end an answer are never part of its text.
const MARKS: [&str; 21] = [
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "<|python_tag|>",
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|tool_call|>",
    "<|/tool_call|>",
];

impl Tokenizer {
    /// The marks that this vocabulary has as control tokens. Takes some microseconds.
    pub fn marks(&self) -> Vec<u32> {
        let options = EncodeOptions { add_special: false, parse_special: true };
        let alone = |text: &&str| match self.encode(text, options).as_slice() {
            [id] => Some(*id),
            _ => None,
        };
        let marks = MARKS.iter().filter_map(alone);
        marks.filter(|id| self.token_kind(*id) == Some(TokenKind::Control)).collect()
    }
}
