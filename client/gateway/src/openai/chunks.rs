//! Chat completions as answers: whole, and in events.

use rocmforge_client::calls::{Event, Part, parts};
use rocmforge_client::random_request_id;
use serde_json::{Value, json};

use super::{DONE, event, finish_reason, logprobs, usage};
use crate::events::Events;
use crate::failure::Failure;
use crate::generation::{Ended, Piece};

/// The events of an answer, and its whole form.
pub struct Chunks {
    /// The answer's number.
    pub index: usize,
    pub id: String,
    pub created: u64,
    pub model: String,
    /// Alternatives of each token that are wanted; `None` without log-probabilities.
    pub top: Option<usize>,
    pub include_usage: bool,
    /// Calls so far.
    pub calls: usize,
}

fn reason_of(ended: &Ended) -> &'static str {
    match finish_reason(ended.reason) {
        "stop" if ended.called => "tool_calls",
        other => other,
    }
}

fn id_of(id: Option<&String>) -> String {
    id.cloned().unwrap_or_else(|| format!("call_{:032x}", random_request_id()))
}

impl Chunks {
    /// The answers whole.
    pub fn whole(&self, answers: &[(Piece, Ended)]) -> Value {
        let choices = answers.iter().enumerate();
        let choices = choices.map(|(index, (piece, ended))| self.choice(index, piece, ended));
        json!({
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": choices.collect::<Vec<_>>(),
            "usage": usage(answers.iter().map(|(_, ended)| ended)),
        })
    }

    fn choice(&self, index: usize, piece: &Piece, ended: &Ended) -> Value {
        let (text, reasoning) = piece.texts();
        // A call that was cut is told as in a stream, and the reason says that there is no whole one.
        let calls = parts(&piece.parts).into_iter().filter_map(|part| match part {
            Part::Call(call) | Part::Cut(call) => Some(json!({
                "id": id_of(call.id.as_ref()),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            })),
            _ => None,
        });
        let calls: Vec<Value> = calls.collect();
        let mut message = json!({"role": "assistant", "content": text, "refusal": null});
        if !reasoning.is_empty() {
            message["reasoning_content"] = json!(reasoning);
        }
        if !calls.is_empty() {
            if text.is_empty() {
                message["content"] = Value::Null;
            }
            message["tool_calls"] = json!(calls);
        }
        json!({
            "index": index,
            "message": message,
            "logprobs": self.top.map(|top| logprobs::of_chat(&piece.tokens, top)),
            "finish_reason": reason_of(ended),
        })
    }

    fn chunk(&self, choices: Value, usage: Option<Value>) -> String {
        let mut chunk = json!({
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        });
        if self.include_usage {
            chunk["usage"] = usage.unwrap_or(Value::Null);
        }
        event(&chunk)
    }

    fn delta(&self, delta: Value, logprobs: Option<Value>, finish_reason: Option<&str>) -> String {
        let choice = json!({"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason});
        self.chunk(json!([choice]), None)
    }

    /// Name first, then the arguments, as the API's own service sends them.
    fn call(&mut self, name: &str, id: Option<&String>) -> Value {
        let index = self.calls;
        self.calls += 1;
        let function = json!({"name": name, "arguments": ""});
        json!({"tool_calls": [{"index": index, "id": id_of(id), "type": "function", "function": function}]})
    }

    fn arguments(&self, text: &str) -> Value {
        let index = self.calls.saturating_sub(1);
        json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
    }
}

impl Events for Chunks {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn begin(&mut self, _prompt_tokens: usize) -> String {
        self.delta(json!({"role": "assistant", "content": ""}), None, None)
    }

    fn piece(&mut self, piece: &Piece) -> String {
        let mut deltas = Vec::with_capacity(piece.parts.len().max(1));
        for part in &piece.parts {
            match part {
                Event::Text(text) => deltas.push(json!({"content": text})),
                Event::Reasoning(text) => deltas.push(json!({"reasoning_content": text})),
                Event::CallBegin { name, id } => deltas.push(self.call(name, id.as_ref())),
                Event::Arguments(text) => deltas.push(self.arguments(text)),
                Event::CallEnd { .. } => {}
            }
        }
        if deltas.is_empty() && !piece.tokens.is_empty() {
            deltas.push(json!({})); // tokens of a text that comes later
        }
        let mut logprobs = self.top.map(|top| logprobs::of_chat(&piece.tokens, top));
        deltas.into_iter().map(|delta| self.delta(delta, logprobs.take(), None)).collect()
    }

    fn end(&mut self, ended: &Ended) -> String {
        self.delta(json!({}), None, Some(reason_of(ended)))
    }

    fn after_all(&mut self, all: &[Ended]) -> String {
        let events = match self.include_usage {
            true => self.chunk(json!([]), Some(usage(all))),
            false => String::new(),
        };
        events + DONE
    }

    fn failed(&mut self, failure: &Failure) -> String {
        event(&failure.body(crate::api::Api::OpenAi))
    }
}
