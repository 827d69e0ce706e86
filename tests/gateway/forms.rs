//! Forms of answers, penalties and biases through OpenAI's and Ollama's APIs.

use rocmforge_client::wire::{
    AnswerForm, ChatMessage, FormKind, GenerateRequest, Penalties, Prompt, SamplingOptions, limits,
};
use serde_json::{Value, json};

use crate::door::{CHATTY, Door};
use crate::rig::{Answer, TINY, collect};

const STORY: &str = "Once upon a time";

fn direct(door: &Door, request: &GenerateRequest) -> Answer {
    collect(&mut door.rig.client().generate(request).unwrap()).unwrap()
}

fn schema() -> Value {
    json!({
        "type": "object", "additionalProperties": false, "required": ["size", "kind"],
        "properties": {"size": {"type": "integer", "minimum": 1, "maximum": 99}, "kind": {"enum": ["cat", "dog"]}},
    })
}

fn check(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert!((1..=99).contains(&value["size"].as_u64().unwrap()), "{text}");
    assert!(value["kind"] == "cat" || value["kind"] == "dog", "{text}");
    assert!(text.find("size") < text.find("kind"), "in the schema's order: {text}");
}

#[test]
fn a_chat_answers_by_a_schema_in_both_apis() {
    let door = Door::open();
    let messages = json!([{"role": "user", "content": "ab"}]);
    for seed in 0..3 {
        let format = json!({"type": "json_schema", "json_schema": {"name": "pet", "strict": true, "schema": schema()}});
        let body = json!({"model": CHATTY, "messages": messages, "seed": seed, "response_format": format});
        let whole = door.post("/v1/chat/completions", &body).json();
        check(whole["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{whole}")));
        assert_eq!(whole["choices"][0]["finish_reason"], "stop");
        let options = json!({"seed": seed, "temperature": 1.0, "top_k": 0});
        let body = json!({"model": CHATTY, "messages": messages, "stream": false, "format": schema(), "options": options});
        let whole = door.post("/api/chat", &body).json();
        check(whole["message"]["content"].as_str().unwrap_or_else(|| panic!("{whole}")));
        assert_eq!(whole["done_reason"], "stop");
    }
    // Any object: this model's text would go on for long.
    let message = ChatMessage { role: "user".into(), content: "ab".into() };
    let request = GenerateRequest::new(CHATTY, Prompt::Chat(vec![message]));
    let any = AnswerForm::new(FormKind::JsonSchema, r#"{"type": "object"}"#);
    let expected = direct(&door, &GenerateRequest { max_tokens: 30, ..request }.with_form(&any)).text;
    assert!(expected.starts_with('{'), "{expected}");
    let body = json!({"model": CHATTY, "messages": messages, "temperature": 0, "max_tokens": 30,
        "response_format": {"type": "json_object"}});
    let whole = door.post("/v1/chat/completions", &body).json();
    assert_eq!(whole["choices"][0]["message"]["content"], expected.as_str());
    let body = json!({"model": CHATTY, "messages": messages, "stream": false, "format": "json",
        "options": {"temperature": 0, "num_predict": 30}});
    assert_eq!(door.post("/api/chat", &body).json()["message"]["content"], expected.as_str());
}

#[test]
fn penalties_and_biases_reach_the_daemon() {
    let door = Door::open();
    let sampling = SamplingOptions { temperature: 1.0, seed: Some(7), ..SamplingOptions::default() };
    let request = |penalties: &Penalties| {
        let request = GenerateRequest::new(TINY, Prompt::Text(STORY.to_owned()));
        GenerateRequest { max_tokens: 40, sampling: sampling.clone(), ..request }.with_penalties(penalties)
    };
    let expected = direct(
        &door,
        &request(&Penalties {
            frequency: 1.5,
            presence: -0.5,
            last: limits::PENALTY_TOKENS_MAX,
            prompt: false,
            bias: vec![(300, 5.0), (13, -100.0)],
            ..Penalties::default()
        }),
    );
    let body = json!({
        "model": TINY, "prompt": STORY, "max_tokens": 40, "seed": 7,
        "frequency_penalty": 1.5, "presence_penalty": -0.5, "logit_bias": {"300": 5, "13": -100},
    });
    assert_eq!(door.post("/v1/completions", &body).json()["choices"][0]["text"], expected.text.as_str());
    let penalties =
        Penalties { repeat: 1.4, frequency: 0.25, presence: 0.5, last: 10, ..Penalties::default() };
    let expected = direct(&door, &request(&penalties));
    let options = json!({
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 7, "num_predict": 40,
        "repeat_penalty": 1.4, "frequency_penalty": 0.25, "presence_penalty": 0.5, "repeat_last_n": 10,
    });
    let body = json!({"model": TINY, "prompt": STORY, "stream": false, "raw": true, "options": options});
    assert_eq!(door.post("/api/generate", &body).json()["response"], expected.text.as_str());
}

#[test]
fn a_schema_that_cannot_be_kept_to_is_refused_with_its_fault() {
    let door = Door::open();
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "strange"}}});
    let body =
        json!({"model": CHATTY, "messages": [{"role": "user", "content": "ab"}], "response_format": format});
    let response = door.post("/v1/chat/completions", &body);
    assert_eq!(response.status, 400, "{}", response.body);
    assert!(response.body.contains("strange"), "{}", response.body);
    let body = json!({"model": CHATTY, "prompt": "ab", "logit_bias": {"100000": 1}});
    assert_eq!(door.post("/v1/completions", &body).status, 400);
}
