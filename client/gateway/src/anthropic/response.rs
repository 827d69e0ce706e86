//! Messages as answers: whole, and in events.

use rocmforge_client::calls::{Call, Event as Part};
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
    /// Blocks that began.
    blocks: usize,
    /// The type of the block that is open.
    open: Option<&'static str>,
}

fn stop_reason(ended: &Ended) -> &'static str {
    match ended.reason {
        StopReason::EndOfGeneration | StopReason::StopText if ended.called => "tool_use",
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

fn id_of(call: &Call) -> String {
    call.id.clone().unwrap_or_else(|| format!("toolu_{:032x}", random_request_id()))
}

impl Message {
    /// An answer of that model.
    pub fn new(model: String) -> Self {
        Self { id: format!("msg_{:032x}", random_request_id()), model, blocks: 0, open: None }
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
        let block = |part: &Part| match part {
            Part::Text(text) => json!({"type": "text", "text": text}),
            // The signature is for the service, which would not take the block without one.
            Part::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
            Part::Call(call) => {
                // The parser made the arguments from an object.
                let input: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
                json!({"type": "tool_use", "id": id_of(call), "name": call.name, "input": input})
            }
        };
        let content = piece.parts.iter().map(block).collect();
        let mut value = self.value(content, ended.usage.prompt_tokens as usize, ended.usage.generated_tokens);
        value["stop_reason"] = json!(stop_reason(ended));
        value["stop_sequence"] = json!(ended.stop_text);
        value
    }

    fn begin_block(&mut self, kind: &'static str, block: &Value) -> String {
        let events = self.end_block();
        let index = self.blocks;
        self.blocks += 1;
        self.open = Some(kind);
        events + &event(&json!({"type": "content_block_start", "index": index, "content_block": block}))
    }

    fn end_block(&mut self) -> String {
        match self.open.take() {
            Some(_) => event(&json!({"type": "content_block_stop", "index": self.blocks.saturating_sub(1)})),
            None => String::new(),
        }
    }

    fn delta(&self, delta: &Value) -> String {
        let index = self.blocks.saturating_sub(1);
        event(&json!({"type": "content_block_delta", "index": index, "delta": delta}))
    }

    fn part(&mut self, part: &Part) -> String {
        let (kind, block, delta) = match part {
            Part::Text(text) => {
                ("text", json!({"type": "text", "text": ""}), json!({"type": "text_delta", "text": text}))
            }
            Part::Reasoning(text) => (
                "thinking",
                json!({"type": "thinking", "thinking": "", "signature": ""}),
                json!({"type": "thinking_delta", "thinking": text}),
            ),
            Part::Call(call) => (
                "tool_use",
                json!({"type": "tool_use", "id": id_of(call), "name": call.name, "input": {}}),
                json!({"type": "input_json_delta", "partial_json": call.arguments}),
            ),
        };
        let goes_on = kind != "tool_use" && self.open == Some(kind);
        let begun = if goes_on { String::new() } else { self.begin_block(kind, &block) };
        begun + &self.delta(&delta)
    }
}

impl Events for Message {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn begin(&mut self, prompt_tokens: usize) -> String {
        let message = self.value(json!([]), prompt_tokens, 0);
        event(&json!({"type": "message_start", "message": message}))
    }

    fn piece(&mut self, piece: &Piece) -> String {
        piece.parts.iter().map(|part| self.part(part)).collect()
    }

    fn end(&mut self, ended: &Ended) -> String {
        let delta = json!({"stop_reason": stop_reason(ended), "stop_sequence": ended.stop_text});
        let usage = json!({"output_tokens": ended.usage.generated_tokens});
        self.end_block()
            + &event(&json!({"type": "message_delta", "delta": delta, "usage": usage}))
            + &event(&json!({"type": "message_stop"}))
    }

    fn failed(&mut self, failure: &Failure) -> String {
        event(&failure.body(Api::Anthropic))
    }
}
