//! Responses as answers: whole, and in events.

use std::sync::Arc;

use rocmforge_client::wire::StopReason;
use serde_json::{Value, json};

use super::output::Output;
use crate::Gateway;
use crate::access::Identity;
use crate::events::Events;
use crate::failure::Failure;
use crate::generation::{Ended, Piece};
use crate::kept::Entry;

/// A response that is being told. It is kept when it has ended.
pub struct Told {
    gateway: Arc<Gateway>,
    /// The caller, and the response's number.
    key: (Identity, u128),
    /// The fields that are known before the answer, as JSON: as values, a tool's schema takes a hundred times its text.
    fields: String,
    /// The conversation before the answer, if the response shall be kept.
    items: Option<String>,
    output: Output,
}

impl Told {
    /// A response with these fields, a JSON object. `items` are the conversation before it, without the list's brackets.
    pub fn new(gateway: Arc<Gateway>, key: (Identity, u128), fields: String, items: Option<String>) -> Self {
        Self { gateway, key, fields, items, output: Output::default() }
    }

    /// The response in one piece.
    pub fn whole(&mut self, piece: &Piece, ended: &Ended) -> Value {
        for part in &piece.parts {
            self.output.push(part);
        }
        self.finish(ended).1
    }

    /// The response so far.
    fn response(&self, status: &str) -> Value {
        // The text is this program's own.
        let mut response: Value = serde_json::from_str(&self.fields).unwrap_or_default();
        response["status"] = json!(status);
        response["output"] = json!(self.output.items());
        response
    }

    /// Completes and keeps the response. Returns the events of the last item, too.
    fn finish(&mut self, ended: &Ended) -> (String, Value) {
        let status = match ended.reason {
            StopReason::EndOfGeneration | StopReason::StopText => "completed",
            StopReason::MaxTokens | StopReason::ContextFull => "incomplete",
        };
        let events = self.output.finish(status);
        let mut response = self.response(status);
        if status == "incomplete" {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        response["usage"] = usage(ended);
        if let Some(mut items) = self.items.take() {
            for item in self.output.items() {
                items.push(',');
                items.push_str(&item.to_string());
            }
            let entry = Entry { answer: response.to_string(), items };
            self.gateway.kept.put(self.key.0, self.key.1, entry);
        }
        (events, response)
    }

    fn event(&mut self, kind: &str, response: Value) -> String {
        self.output.event(kind, json!({ "response": response }))
    }
}

fn usage(ended: &Ended) -> Value {
    let (input, output) = (ended.usage.prompt_tokens, ended.usage.generated_tokens);
    json!({
        "input_tokens": input,
        "input_tokens_details": {"cached_tokens": ended.reused_tokens},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": ended.reasoning_tokens},
        "total_tokens": u64::from(input) + u64::from(output),
    })
}

impl Events for Told {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn begin(&mut self, _prompt_tokens: usize) -> String {
        let response = self.response("in_progress");
        self.event("response.created", response.clone()) + &self.event("response.in_progress", response)
    }

    fn piece(&mut self, piece: &Piece) -> String {
        piece.parts.iter().map(|part| self.output.push(part)).collect()
    }

    fn end(&mut self, ended: &Ended) -> String {
        let (events, response) = self.finish(ended);
        let kind = match response["status"].as_str() {
            Some("incomplete") => "response.incomplete",
            _ => "response.completed",
        };
        events + &self.event(kind, response)
    }

    fn failed(&mut self, failure: &Failure) -> String {
        let events = self.output.finish("incomplete");
        let mut response = self.response("failed");
        response["error"] = json!({"code": "server_error", "message": failure.message});
        events + &self.event("response.failed", response)
    }
}
