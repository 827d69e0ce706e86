//! Messages as answers: whole, and in events.

use rocmforge_client::calls::{Event, Part, parts};
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

/// Tokens that were known from an earlier prompt are apart from the rest of the input.
fn usage(input: u64, reused: u64, output: u32) -> Value {
    json!({
        "input_tokens": input.saturating_sub(reused),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reused,
        "output_tokens": output,
    })
}

fn usage_of(ended: &Ended) -> Value {
    usage(ended.usage.prompt_tokens.into(), ended.reused_tokens, ended.usage.generated_tokens)
}

fn event(value: &Value) -> String {
    let name = value["type"].as_str().unwrap_or_default();
    format!("event: {name}\ndata: {value}\n\n")
}

fn id_of(id: Option<&String>) -> String {
    id.cloned().unwrap_or_else(|| format!("toolu_{:032x}", random_request_id()))
}

impl Message {
    /// An answer of that model.
    pub fn new(model: String) -> Self {
        Self { id: format!("msg_{:032x}", random_request_id()), model, blocks: 0, open: None }
    }

    fn value(&self, content: Value, usage: &Value) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage,
        })
    }

    /// The answer in one piece.
    pub fn whole(&self, piece: &Piece, ended: &Ended) -> Value {
        let block = |part: &Part| match part {
            Part::Text(text) => Some(json!({"type": "text", "text": text})),
            // The signature is for the service, which would not take the block without one.
            Part::Reasoning(text) => Some(json!({"type": "thinking", "thinking": text, "signature": ""})),
            Part::Call(call) => {
                // The parser found that they are an object.
                let input: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
                let id = id_of(call.id.as_ref());
                Some(json!({"type": "tool_use", "id": id, "name": call.name, "input": input}))
            }
            // The input is an object, and there is none.
            Part::Cut(_) => None,
        };
        let content = parts(&piece.parts).iter().filter_map(block).collect();
        let mut value = self.value(content, &usage_of(ended));
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

    fn part(&mut self, part: &Event) -> String {
        let (kind, block, delta) = match part {
            Event::Text(text) => {
                ("text", json!({"type": "text", "text": ""}), json!({"type": "text_delta", "text": text}))
            }
            Event::Reasoning(text) => (
                "thinking",
                json!({"type": "thinking", "thinking": "", "signature": ""}),
                json!({"type": "thinking_delta", "thinking": text}),
            ),
            Event::CallBegin { name, id } => {
                let block = json!({"type": "tool_use", "id": id_of(id.as_ref()), "name": name, "input": {}});
                return self.begin_block("tool_use", &block);
            }
            Event::Arguments(text) => {
                return self.delta(&json!({"type": "input_json_delta", "partial_json": text}));
            }
            Event::CallEnd { .. } => return self.end_block(),
        };
        let begun = if self.open == Some(kind) { String::new() } else { self.begin_block(kind, &block) };
        begun + &self.delta(&delta)
    }
}

impl Events for Message {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn begin(&mut self, prompt_tokens: usize) -> String {
        // The number of reused tokens is known at the end.
        let message = self.value(json!([]), &usage(prompt_tokens as u64, 0, 0));
        event(&json!({"type": "message_start", "message": message}))
    }

    fn piece(&mut self, piece: &Piece) -> String {
        piece.parts.iter().map(|part| self.part(part)).collect()
    }

    fn end(&mut self, ended: &Ended) -> String {
        let delta = json!({"stop_reason": stop_reason(ended), "stop_sequence": ended.stop_text});
        self.end_block()
            + &event(&json!({"type": "message_delta", "delta": delta, "usage": usage_of(ended)}))
            + &event(&json!({"type": "message_stop"}))
    }

    fn failed(&mut self, failure: &Failure) -> String {
        event(&failure.body(Api::Anthropic))
    }
}
