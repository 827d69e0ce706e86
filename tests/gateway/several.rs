//! Several answers to one request.

use serde_json::{Value, json};

use crate::door::{CHATTY, Door};
use crate::rig::TINY;

const STORY: &str = "Once upon a time, there was a little girl named Lily. She loved to play outside in the";

fn texts(choices: &Value) -> Vec<String> {
    let one = |(index, choice): (usize, &Value)| {
        assert_eq!(choice["index"], index);
        choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap().to_owned()
    };
    choices.as_array().unwrap().iter().enumerate().map(one).collect()
}

#[test]
fn several_answers_are_those_of_the_seeds_one_after_the_other() {
    let door = Door::open();
    let ask = |fields: Value| {
        let mut body =
            json!({"model": TINY, "prompt": STORY, "max_tokens": 12, "temperature": 1, "seed": 40});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        door.post("/v1/completions", &body)
    };
    let alone: Vec<String> =
        (0..4).flat_map(|i| texts(&ask(json!({"seed": 40 + i})).json()["choices"])).collect();
    let together = ask(json!({"n": 4})).json();
    assert_eq!(texts(&together["choices"]), alone);
    assert_eq!(together["usage"]["completion_tokens"], 48);
    let mut streamed = vec![String::new(); 4];
    let mut ends = 0;
    let events = ask(json!({"n": 4, "stream": true, "stream_options": {"include_usage": true}})).events();
    for event in &events {
        for choice in event["choices"].as_array().unwrap() {
            streamed[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
            ends += usize::from(choice["finish_reason"] == "length");
        }
    }
    assert_eq!((streamed, ends), (alone, 4));
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], 48);
    let random = texts(&ask(json!({"n": 2, "seed": null})).json()["choices"]);
    assert_ne!(random[0], random[1], "each has a seed of its own");
    assert_eq!((ask(json!({"n": 9})).status, ask(json!({"n": 0})).status), (400, 400));
    assert_eq!((ask(json!({"n": 2, "best_of": 2})).status, ask(json!({"best_of": 2})).status), (200, 400));
}

#[test]
fn several_answers_share_the_pages_of_their_prompt() {
    let door = Door::open();
    let before = door.rig.client().status().unwrap().devices[0].clone();
    let prompt = STORY.repeat(8);
    let body = json!({"model": TINY, "prompt": prompt, "max_tokens": 8, "temperature": 1, "n": 6});
    let tokens = door.post("/v1/completions", &body).json()["usage"]["prompt_tokens"].as_u64().unwrap();
    let after = door.rig.client().status().unwrap().devices[0].clone();
    let computed = after.prefill_rows - before.prefill_rows;
    // Each but the first computes what no whole page holds, and the last token.
    assert!(computed < 2 * tokens, "{computed} rows for six times {tokens} tokens");
}

#[test]
fn a_chat_has_several_answers_too() {
    let door = Door::open();
    let messages = json!([{"role": "user", "content": "ab"}]);
    let mut body = json!({"model": CHATTY, "messages": messages, "max_tokens": 10, "n": 3, "seed": 5});
    let whole = texts(&door.post("/v1/chat/completions", &body).json()["choices"]);
    body["stream"] = json!(true);
    let mut streamed = vec![String::new(); 3];
    for event in door.post("/v1/chat/completions", &body).events() {
        let choice = &event["choices"][0];
        streamed[choice["index"].as_u64().unwrap() as usize] +=
            choice["delta"]["content"].as_str().unwrap_or("");
    }
    assert_eq!(streamed, whole);
}
