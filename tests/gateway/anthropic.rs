//! Anthropic's API.

use rocmforge_client::wire::{ChatMessage, GenerateRequest, Prompt};
use serde_json::{Value, json};

use crate::door::{CHATTY, Door};
use crate::http::Response;
use crate::rig::{Answer, collect};

/// Names and data of a stream's events.
#[track_caller]
fn events(response: &Response) -> Vec<(String, Value)> {
    assert_eq!((response.status, response.header("content-type")), (200, Some("text/event-stream")));
    let event = |text: &str| {
        let (name, data) = text.split_once("\ndata: ").unwrap();
        let name = name.strip_prefix("event: ").unwrap().to_owned();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name.as_str());
        (name, data)
    };
    response.body.split_terminator("\n\n").map(event).collect()
}

fn direct(door: &Door, messages: &[(&str, &str)], max_tokens: u32) -> Answer {
    let messages = messages
        .iter()
        .map(|(role, content)| ChatMessage { role: (*role).to_owned(), content: (*content).to_owned() });
    let request = GenerateRequest::new(CHATTY, Prompt::Chat(messages.collect()));
    let request = GenerateRequest { max_tokens, ..request };
    collect(&mut door.rig.client().generate(&request).unwrap()).unwrap()
}

#[test]
fn a_message_has_the_daemons_text_whole_and_in_events() {
    let door = Door::open();
    let expected = direct(&door, &[("system", "ab"), ("user", "ba"), ("assistant", "b"), ("user", "a")], 7);
    let mut body = json!({
        "model": CHATTY, "max_tokens": 7, "temperature": 0,
        "system": [{"type": "text", "text": "ab", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "ba"},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
            {"role": "user", "content": "a"},
        ],
        "metadata": {"user_id": "me"},
    });
    let whole = door.post("/v1/messages", &body).json();
    assert_eq!(whole["content"], json!([{"type": "text", "text": expected.text}]));
    assert_eq!((&whole["role"], &whole["stop_reason"]), (&json!("assistant"), &json!("max_tokens")));
    let of_prompt = |usage: &Value| {
        let tokens = |name| usage[name].as_u64().unwrap();
        assert_eq!(tokens("cache_creation_input_tokens"), 0);
        tokens("input_tokens") + tokens("cache_read_input_tokens")
    };
    assert_eq!(of_prompt(&whole["usage"]), expected.prompt_ids.len() as u64);
    assert_eq!(whole["usage"]["output_tokens"], 7);
    body["stream"] = json!(true);
    let events = events(&door.post("/v1/messages", &body));
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[..2], ["message_start", "content_block_start"]);
    assert_eq!(names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    assert_eq!(events[0].1["message"]["usage"]["input_tokens"], expected.prompt_ids.len());
    let text: String = events.iter().filter_map(|(_, data)| data["delta"]["text"].as_str()).collect();
    assert_eq!(text, expected.text);
    let delta = &events[events.len() - 2].1;
    assert_eq!(of_prompt(&delta["usage"]), expected.prompt_ids.len() as u64);
    assert_eq!(
        (&delta["delta"]["stop_reason"], &delta["usage"]["output_tokens"]),
        (&json!("max_tokens"), &json!(7))
    );
    let counted = json!({"model": CHATTY, "system": body["system"], "messages": body["messages"]});
    let counted = door.post("/v1/messages/count_tokens", &counted).json();
    assert_eq!(counted, json!({"input_tokens": expected.prompt_ids.len()}));
}

#[test]
fn the_text_that_ended_a_message_is_named() {
    let door = Door::open();
    let text = direct(&door, &[("user", "ab")], 9).text;
    // Two texts of the answer, so that the earlier one ends it.
    let mut parts = text.char_indices().map(|(start, _)| start).filter(|start| *start > 0);
    let (first, second) = (parts.next().unwrap(), parts.next().unwrap());
    let (early, late) = (&text[first..second], &text[second..]);
    for (stops, told) in [(vec!["\u{1}never", early, late], early), (vec![early], early)] {
        let body = json!({
            "model": CHATTY, "max_tokens": 9, "temperature": 0, "stop_sequences": stops,
            "messages": [{"role": "user", "content": "ab"}],
        });
        let whole = door.post("/v1/messages", &body).json();
        assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!("stop_sequence"), &json!(told)));
        let before = &text[..text.find(told).unwrap()];
        assert_eq!(whole["content"][0]["text"], before);
    }
}

#[test]
fn refusals_have_the_apis_form() {
    let door = Door::open();
    let good = json!({"model": CHATTY, "max_tokens": 1, "messages": [{"role": "user", "content": "ab"}]});
    for (name, value) in [
        ("max_tokens", json!(null)),
        ("tools[0].name", json!([{"name": "two words"}])),
        ("tools[0].type", json!([{"type": "bash_20250124", "name": "bash"}])),
        ("tool_choice", json!({"type": "any"})),
        ("thinking", json!({"type": "enabled", "budget_tokens": 1024})),
        ("output_config.effort", json!({"effort": "low"})),
        ("output_config.format.type", json!({"format": {"type": "text", "schema": {}}})),
        ("output_config.format.schema", json!({"format": {"type": "json_schema"}})),
        ("temperature", json!(1.5)),
        ("messages", json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])),
        ("messages[0].role", json!([{"role": "system", "content": "a"}])),
        ("messages[0].content[0].type", json!([{"role": "user", "content": [{"type": "image"}]}])),
        ("invented", json!(1)),
    ] {
        let mut body = good.clone();
        body[name.split(['[', '.']).next().unwrap()] = value;
        let response = door.post("/v1/messages", &body);
        let error = response.json();
        assert_eq!((response.status, &error["type"]), (400, &json!("error")), "{name}");
        assert_eq!(error["error"]["type"], "invalid_request_error");
        assert!(error["error"]["message"].as_str().unwrap().starts_with(name), "{error}");
    }
    let mut body = good;
    body["model"] = json!("none");
    let missing = door.post("/v1/messages", &body);
    assert_eq!((missing.status, &missing.json()["error"]["type"]), (404, &json!("not_found_error")));
}
