//! Forms of answers, penalties and biases through OpenAI's and Ollama's APIs.

use rocmforge_client::wire::{
    AnswerForm, ChatMessage, Dry, FormKind, GenerateRequest, Penalties, Prompt, Samplers, SamplingOptions,
    limits,
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
fn further_samplers_reach_the_daemon() {
    let door = Door::open();
    let sampling = SamplingOptions { temperature: 1.0, seed: Some(7), ..SamplingOptions::default() };
    let request = GenerateRequest::new(TINY, Prompt::Text(STORY.to_owned()));
    let request = GenerateRequest { max_tokens: 40, sampling, ..request };
    let dry =
        Dry { multiplier: 2.0, base: 1.5, allowed_length: 1, last: 100, breakers: vec![".".to_owned()] };
    let samplers = Samplers {
        typical_p: 0.8,
        top_n_sigma: 2.0,
        xtc_probability: 0.5,
        xtc_threshold: 0.2,
        dynatemp_range: 0.5,
        dynatemp_exponent: 1.5,
        dry,
        ..Samplers::default()
    };
    let mut fields = json!({
        "typical_p": 0.8, "top_n_sigma": 2, "xtc_probability": 0.5, "xtc_threshold": 0.2, "dynatemp_range": 0.5,
        "dynatemp_exponent": 1.5, "dry_multiplier": 2, "dry_base": 1.5, "dry_allowed_length": 1,
        "dry_penalty_last_n": 100, "dry_sequence_breakers": ["."], "top_k": 0, "seed": 7,
    });
    let ask = |fields: &Value| {
        let mut body = fields.clone();
        (body["model"], body["prompt"], body["max_tokens"]) = (json!(TINY), json!(STORY), json!(40));
        let openai = door.post("/v1/completions", &body).json()["choices"][0]["text"].clone();
        let mut options = fields.clone();
        options["temperature"] = json!(1.0);
        (options["top_p"], options["num_predict"]) = (json!(1.0), json!(40));
        let body = json!({"model": TINY, "prompt": STORY, "stream": false, "raw": true, "options": options});
        let ollama = door.post("/api/generate", &body).json()["response"].clone();
        assert_eq!(openai, ollama);
        openai
    };
    assert_eq!(ask(&fields), direct(&door, &request.clone().with_samplers(&samplers)).text.as_str());
    let samplers = Samplers { mirostat: true, mirostat_tau: 1.5, mirostat_eta: 0.5, ..samplers };
    (fields["mirostat"], fields["mirostat_tau"], fields["mirostat_eta"]) = (json!(2), json!(1.5), json!(0.5));
    assert_eq!(ask(&fields), direct(&door, &request.with_samplers(&samplers)).text.as_str());
}

#[test]
fn a_grammar_is_kept_to_and_not_beside_another_form() {
    let door = Door::open();
    let grammar = "root ::= [a-c] (\"-\" [a-c]){3}";
    let is_kept = |text: &Value| {
        let text = text.as_str().unwrap();
        text.len() == 7 && text.split('-').all(|part| ["a", "b", "c"].contains(&part))
    };
    let body = json!({"model": TINY, "prompt": STORY, "grammar": grammar, "max_tokens": 50});
    assert!(is_kept(&door.post("/v1/completions", &body).json()["choices"][0]["text"]));
    let messages = json!([{"role": "user", "content": "ab"}]);
    let mut body = json!({"model": CHATTY, "messages": messages, "grammar": grammar});
    assert!(is_kept(&door.post("/v1/chat/completions", &body).json()["choices"][0]["message"]["content"]));
    body["response_format"] = json!({"type": "json_object"});
    let refused = door.post("/v1/chat/completions", &body);
    assert_eq!((refused.status, refused.json()["error"]["param"].clone()), (400, json!("grammar")));
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
