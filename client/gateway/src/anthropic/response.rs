//! Messages as answers: whole, and in events.

use rocmforge_client::random_request_id;
use rocmforge_client::wire::StopReason;
use serde_json::{Value, json};

use crate::api::Api;
use crate::events::Events;
use crate::failure::Failure;
use crate::generation::{Ended, Piece};

/// The answer to one request.
pub struct Message {
    id: String,
    model: String,
}

fn stop_reason(reason: StopReason) -> &'static str {
    match reason {
        StopReason::EndOfGeneration => "end_turn",
        StopReason::StopText => "stop_sequence",
        StopReason::MaxTokens => "max_tokens",
        StopReason::ContextFull => "model_context_window_exceeded",
    }
}

fn event(value: &Value) -> String {
    let name = value["type"].as_str().unwrap_or_default();
    format!("event: {name}\ndata: {value}\n\n")
}

impl Message {
    /// An answer of that model.
    pub fn new(model: String) -> Self {
        Self { id: format!("msg_{:032x}", random_request_id()), model }
    }

    fn value(&self, content: Value, input_tokens: usize, output_tokens: u32) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": null,
            "stop_sequence": null,
            "usage": {"input_tokens": input_tokens, "output_tokens": output_tokens},
        })
    }

    /// The answer in one piece.
    pub fn whole(&self, piece: &Piece, ended: &Ended) -> Value {
        let content = json!([{"type": "text", "text": piece.text}]);
        let mut value = self.value(content, ended.usage.prompt_tokens as usize, ended.usage.generated_tokens);
        value["stop_reason"] = json!(stop_reason(ended.reason));
        value["stop_sequence"] = json!(ended.stop_text);
        value
    }
}

impl Events for Message {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn begin(&mut self, prompt_tokens: usize) -> String {
        let message = self.value(json!([]), prompt_tokens, 0);
        let block = json!({"type": "text", "text": ""});
        event(&json!({"type": "message_start", "message": message}))
            + &event(&json!({"type": "content_block_start", "index": 0, "content_block": block}))
    }

    fn piece(&mut self, piece: &Piece) -> String {
        let delta = json!({"type": "text_delta", "text": piece.text});
        event(&json!({"type": "content_block_delta", "index": 0, "delta": delta}))
    }

    fn end(&mut self, ended: &Ended) -> String {
        let delta = json!({"stop_reason": stop_reason(ended.reason), "stop_sequence": ended.stop_text});
        let usage = json!({"output_tokens": ended.usage.generated_tokens});
        event(&json!({"type": "content_block_stop", "index": 0}))
            + &event(&json!({"type": "message_delta", "delta": delta, "usage": usage}))
            + &event(&json!({"type": "message_stop"}))
    }

    fn failed(&mut self, failure: &Failure) -> String {
        event(&failure.body(Api::Anthropic))
    }
}
