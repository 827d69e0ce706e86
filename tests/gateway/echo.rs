//! Completions that begin with their prompt.

use rocmforge_client::wire::{GenerateRequest, Prompt};
use serde_json::{Value, json};

use crate::door::Door;
use crate::rig::TINY;

const STORY: &str = "Once upon a time, there was";

fn ask(door: &Door, fields: &Value) -> Value {
    let mut body = json!({"model": TINY, "prompt": STORY, "temperature": 0, "max_tokens": 6});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    door.post("/v1/completions", &body).json()
}

#[test]
fn the_prompt_comes_before_the_answer() {
    let door = Door::open();
    let plain = ask(&door, &json!({}));
    let text = format!("{STORY}{}", plain["choices"][0]["text"].as_str().unwrap());
    let echoed = ask(&door, &json!({"echo": true}));
    assert_eq!(echoed["choices"][0]["text"], text.as_str());
    assert_eq!(echoed["choices"][0]["logprobs"], Value::Null);
    assert_eq!(echoed["usage"]["total_tokens"], plain["usage"]["total_tokens"]);
    let none = ask(&door, &json!({"echo": true, "max_tokens": 0}));
    assert_eq!(none["choices"][0]["text"], STORY);
    assert_eq!(
        (&none["choices"][0]["finish_reason"], &none["usage"]["completion_tokens"]),
        (&json!("length"), &json!(0))
    );
    let body = json!({"model": TINY, "prompt": STORY, "temperature": 0, "max_tokens": 6, "echo": true, "stream": true});
    let streamed = door.post("/v1/completions", &body).events();
    let streamed: String = streamed.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(streamed, text);
    let ids: Vec<u32> = vec![1, 403, 407, 261, 378];
    let told = ask(&door, &json!({"prompt": ids, "echo": true, "max_tokens": 0}));
    assert_eq!(told["choices"][0]["text"], "Once upon a time");
    let refused = door.post("/v1/completions", &json!({"model": TINY, "prompt": STORY, "max_tokens": 0}));
    assert_eq!(refused.status, 400);
}

#[test]
fn an_echo_has_the_log_probabilities_of_the_prompt() {
    let door = Door::open();
    let whole = ask(&door, &json!({"echo": true, "logprobs": 2}));
    let plain = ask(&door, &json!({"logprobs": 2}));
    let (all, answer) = (&whole["choices"][0]["logprobs"], &plain["choices"][0]["logprobs"]);
    let list = |value: &Value| value.as_array().unwrap().clone();
    let prompt = list(&all["tokens"]).len() - 6;
    assert_eq!(list(&all["tokens"])[prompt..], list(&answer["tokens"])[..]);
    assert_eq!(list(&all["top_logprobs"])[prompt..], list(&answer["top_logprobs"])[..]);
    // They are those of the daemon.
    let client = door.rig.client();
    let request = GenerateRequest::new(TINY, Prompt::Text(STORY.to_owned()));
    let request = GenerateRequest { max_tokens: 1, ..request }.with_scores(2);
    let mut generation = client.generate(&request).unwrap();
    let mut scores = Vec::new();
    while let Some(item) = generation.next_item().unwrap() {
        if item.ids.is_empty() {
            scores.extend(item.logprobs);
        }
    }
    assert_eq!((scores.len() + 1, &all["token_logprobs"][0]), (prompt, &Value::Null));
    for (at, score) in scores.iter().enumerate() {
        let told = all["token_logprobs"][at + 1].as_f64().unwrap();
        assert!((told - f64::from(score.logprob)).abs() < 1e-4, "token {}: {told} {}", at + 1, score.logprob);
        assert_eq!(all["top_logprobs"][at + 1].as_object().unwrap().len(), 2);
    }
    // Each token is at its offset in the text, but the mark that begins every text of this model.
    let text: Vec<char> = whole["choices"][0]["text"].as_str().unwrap().chars().collect();
    for (token, offset) in list(&all["tokens"]).iter().zip(list(&all["text_offset"])).skip(2) {
        let at: String = text[offset.as_u64().unwrap() as usize..].iter().collect();
        assert!(at.starts_with(token.as_str().unwrap()), "{token} is not at {offset}: {at}");
    }
    let alone = ask(&door, &json!({"echo": true, "logprobs": 0, "max_tokens": 0}));
    assert_eq!(alone["choices"][0]["logprobs"]["top_logprobs"], Value::Null);
    let logprobs = list(&alone["choices"][0]["logprobs"]["token_logprobs"]);
    assert_eq!(logprobs[..], list(&all["token_logprobs"])[..prompt]);
}
