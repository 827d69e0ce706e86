//! Log-probabilities in the two forms of OpenAI's API.

use serde_json::{Map, Value, json};

use crate::generation::Token;
use crate::token_texts::TokenText;

/// Stands for minus infinity, which JSON cannot write.
const IMPOSSIBLE: f32 = -9999.0;

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { IMPOSSIBLE }
}

/// The form of chat completions, with at most `top` alternatives.
pub fn of_chat(tokens: &[Token], top: usize) -> Value {
    let one = |text: &TokenText, logprob: f32| json!({"token": text.text, "logprob": finite(logprob), "bytes": text.bytes});
    let content = tokens.iter().map(|token| {
        let mut value = one(&token.text, token.logprob.unwrap_or(0.0)); // a chat tells no tokens of its prompt
        value["top_logprobs"] =
            token.top.iter().take(top).map(|(text, logprob)| one(text, *logprob)).collect();
        value
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}

/// The form of completions, with at most `top` alternatives. `offset` is the place of the first token in the answer's
/// text, in characters; it becomes that after the last.
pub fn of_completion(tokens: &[Token], top: usize, offset: &mut usize) -> Value {
    let mut offsets = Vec::with_capacity(tokens.len());
    let mut tops = Vec::with_capacity(tokens.len());
    for token in tokens {
        offsets.push(*offset);
        *offset += token.characters;
        let likely = token.top.iter().take(top);
        let likely: Map<String, Value> =
            likely.map(|(text, logprob)| (text.text.clone(), finite(*logprob).into())).collect();
        tops.push(if token.logprob.is_some() { Value::Object(likely) } else { Value::Null });
    }
    json!({
        "tokens": tokens.iter().map(|token| &token.text.text).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| token.logprob.map(finite)).collect::<Vec<_>>(),
        "top_logprobs": if top > 0 { Value::Array(tops) } else { Value::Null },
        "text_offset": offsets,
    })
}
