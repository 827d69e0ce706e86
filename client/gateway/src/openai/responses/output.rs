//! A response's output: items that grow, and the events that tell it.

use rocmforge_client::calls::Event as Part;
use rocmforge_client::random_request_id;
use serde_json::{Value, json};

/// The items of an answer, and the events so far.
#[derive(Debug, Default)]
pub struct Output {
    /// Items that ended.
    items: Vec<Value>,
    open: Option<Open>,
    call: Option<OpenCall>,
    /// Number of the next event.
    sequence: u64,
}

/// An item that grows: a message or a reasoning.
#[derive(Debug)]
struct Open {
    kind: Kind,
    id: String,
    text: String,
}

/// A call that grows.
#[derive(Debug)]
struct OpenCall {
    id: String,
    call_id: String,
    name: String,
    arguments: String,
}

impl OpenCall {
    fn item(&self, status: &str) -> Value {
        json!({"id": self.id, "type": "function_call", "status": status, "call_id": self.call_id,
            "name": self.name, "arguments": self.arguments})
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Message,
    Reasoning,
}

impl Kind {
    /// Event of new text, and of the whole text.
    fn events(self) -> [&'static str; 2] {
        match self {
            Self::Message => ["response.output_text.delta", "response.output_text.done"],
            Self::Reasoning => ["response.reasoning_text.delta", "response.reasoning_text.done"],
        }
    }

    fn part(self, text: &str) -> Value {
        match self {
            Self::Message => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
            Self::Reasoning => json!({"type": "reasoning_text", "text": text}),
        }
    }

    fn item(self, id: &str, status: &str, content: &Value) -> Value {
        match self {
            Self::Message => {
                json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": content})
            }
            Self::Reasoning => {
                json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": content})
            }
        }
    }
}

fn id_of(prefix: &str) -> String {
    format!("{prefix}_{:032x}", random_request_id())
}

impl Output {
    /// One event with the next number.
    pub fn event(&mut self, kind: &str, mut fields: Value) -> String {
        fields["type"] = json!(kind);
        fields["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        format!("event: {kind}\ndata: {fields}\n\n")
    }

    /// Takes a part of the answer, and tells it.
    pub fn push(&mut self, part: &Part) -> String {
        match part {
            Part::Text(text) => self.text(Kind::Message, text),
            Part::Reasoning(text) => self.text(Kind::Reasoning, text),
            Part::CallBegin { name, id } => {
                self.end_item("completed") + &self.begin_call(name.clone(), id.clone())
            }
            Part::Arguments(text) => self.arguments(text),
            Part::CallEnd { whole } => self.end_call(if *whole { "completed" } else { "incomplete" }),
        }
    }

    /// Ends the last item. It is `completed`, or `incomplete` if the answer was cut there.
    pub fn finish(&mut self, status: &str) -> String {
        self.end_item(status) + &self.end_call("incomplete")
    }

    /// The items that ended.
    pub fn items(&self) -> &[Value] {
        &self.items
    }

    fn text(&mut self, kind: Kind, text: &str) -> String {
        let mut events = String::new();
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            events = self.end_item("completed") + &self.begin_item(kind);
        }
        let index = self.items.len();
        let Some(open) = &mut self.open else { return events };
        open.text.push_str(text);
        let mut fields =
            json!({"item_id": open.id, "output_index": index, "content_index": 0, "delta": text});
        if kind == Kind::Message {
            fields["logprobs"] = json!([]);
        }
        events + &self.event(kind.events()[0], fields)
    }

    fn begin_item(&mut self, kind: Kind) -> String {
        let id = id_of(if kind == Kind::Message { "msg" } else { "rs" });
        let index = self.items.len();
        let item = kind.item(&id, "in_progress", &json!([]));
        let added = self.event("response.output_item.added", json!({"output_index": index, "item": item}));
        let part = json!({"item_id": id, "output_index": index, "content_index": 0, "part": kind.part("")});
        self.open = Some(Open { kind, id, text: String::new() });
        added + &self.event("response.content_part.added", part)
    }

    fn end_item(&mut self, status: &str) -> String {
        let Some(Open { kind, id, text }) = self.open.take() else { return String::new() };
        let index = self.items.len();
        let at = json!({"item_id": id, "output_index": index, "content_index": 0});
        let with = |name: &str, value: Value| {
            let mut fields = at.clone();
            fields[name] = value;
            fields
        };
        let mut done = with("text", json!(text));
        if kind == Kind::Message {
            done["logprobs"] = json!([]);
        }
        let part = kind.part(&text);
        let item = kind.item(&id, status, &json!([part]));
        let events = self.event(kind.events()[1], done)
            + &self.event("response.content_part.done", with("part", part))
            + &self.event("response.output_item.done", json!({"output_index": index, "item": item}));
        self.items.push(item);
        events
    }

    fn begin_call(&mut self, name: String, id: Option<String>) -> String {
        let call_id = id.unwrap_or_else(|| id_of("call"));
        let call = OpenCall { id: id_of("fc"), call_id, name, arguments: String::new() };
        let fields = json!({"output_index": self.items.len(), "item": call.item("in_progress")});
        self.call = Some(call);
        self.event("response.output_item.added", fields)
    }

    fn arguments(&mut self, text: &str) -> String {
        let index = self.items.len();
        let Some(call) = &mut self.call else { return String::new() };
        call.arguments.push_str(text);
        let fields = json!({"item_id": call.id, "output_index": index, "delta": text});
        self.event("response.function_call_arguments.delta", fields)
    }

    fn end_call(&mut self, status: &str) -> String {
        let Some(call) = self.call.take() else { return String::new() };
        let (index, item) = (self.items.len(), call.item(status));
        let OpenCall { id, name, arguments, .. } = call;
        let done = json!({"item_id": id, "output_index": index, "arguments": arguments, "name": name});
        let events = self.event("response.function_call_arguments.done", done)
            + &self.event("response.output_item.done", json!({"output_index": index, "item": item}));
        self.items.push(item);
        events
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // tests fail by panicking

    use super::*;

    fn events(text: &str) -> Vec<Value> {
        let data = text.split("\n\n").filter_map(|event| event.split_once("\ndata: "));
        data.map(|(_, data)| serde_json::from_str(data).unwrap()).collect()
    }

    #[test]
    fn items_follow_each_other_and_their_events_are_numbered() {
        let mut output = Output::default();
        let parts = [
            Part::Reasoning("h".into()),
            Part::Reasoning("m".into()),
            Part::Text("yes".into()),
            Part::CallBegin { name: "f".into(), id: Some("call_1".into()) },
            Part::Arguments("{".into()),
            Part::Arguments("}".into()),
            Part::CallEnd { whole: true },
            Part::Text("no".into()),
        ];
        let mut told: String = parts.iter().map(|part| output.push(part)).collect();
        told += &output.finish("incomplete");
        let told = events(&told);
        let numbers: Vec<u64> = told.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
        assert_eq!(numbers, (0..told.len() as u64).collect::<Vec<_>>());
        let of = |kind: &str| told.iter().filter(|event| event["type"] == kind).collect::<Vec<_>>();
        let done = of("response.output_item.done");
        assert_eq!(done.iter().map(|event| event["item"].clone()).collect::<Vec<_>>(), output.items());
        for (index, event) in done.iter().enumerate() {
            assert_eq!(event["output_index"], index);
        }
        let kinds: Vec<&str> = output.items().iter().map(|item| item["type"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["reasoning", "message", "function_call", "message"]);
        assert_eq!(output.items()[0]["content"], json!([{"type": "reasoning_text", "text": "hm"}]));
        assert_eq!(output.items()[2]["call_id"], "call_1");
        let status: Vec<&Value> = output.items().iter().map(|item| &item["status"]).collect();
        assert_eq!(status, ["completed", "completed", "completed", "incomplete"]);
        assert_eq!(of("response.output_item.added").len(), 4);
        assert_eq!(of("response.content_part.added").len(), of("response.content_part.done").len());
        assert_eq!(of("response.function_call_arguments.delta").len(), 2);
        assert_eq!(of("response.function_call_arguments.done")[0]["arguments"], "{}");
    }
}
