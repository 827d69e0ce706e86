//! Ollama's API.

use rocmforge_client::wire::{ChatMessage, GenerateRequest, Prompt};
use serde_json::{Value, json};

use crate::door::{CHATTY, Door, ENDLESS};
use crate::http::Response;
use crate::rig::{TINY, collect};

/// The lines of a stream.
#[track_caller]
fn lines(response: &Response) -> Vec<Value> {
    assert_eq!((response.status, response.header("content-type")), (200, Some("application/x-ndjson")));
    assert!(response.body.ends_with('\n'));
    response.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[track_caller]
fn direct(door: &Door, request: &GenerateRequest) -> String {
    collect(&mut door.rig.client().generate(request).unwrap()).unwrap().text
}

#[test]
fn a_chat_has_the_daemons_text_whole_and_in_lines() {
    let door = Door::open();
    let messages = [("system", "ab"), ("user", "ba")]
        .map(|(role, content)| ChatMessage { role: role.to_owned(), content: content.to_owned() });
    let request = GenerateRequest::new(CHATTY, Prompt::Chat(messages.to_vec()));
    let expected = direct(&door, &GenerateRequest { max_tokens: 7, ..request });
    let mut body = json!({
        "model": format!("{CHATTY}:latest"),
        "messages": [{"role": "system", "content": "ab"}, {"role": "user", "content": "ba", "images": null}],
        "options": {"temperature": 0, "num_predict": 7, "num_ctx": 512, "num_thread": 8, "repeat_penalty": 1.0},
        "keep_alive": "5m", "stream": false,
    });
    let whole = door.post("/api/chat", &body).json();
    assert_eq!(whole["message"], json!({"role": "assistant", "content": expected}));
    assert_eq!(
        (&whole["done"], &whole["done_reason"], &whole["eval_count"]),
        (&json!(true), &json!("length"), &json!(7))
    );
    assert_eq!(whole["model"], CHATTY);
    assert!(whole["total_duration"].as_u64().unwrap() >= whole["eval_duration"].as_u64().unwrap());
    body.as_object_mut().unwrap().remove("stream");
    let lines = lines(&door.post("/api/chat", &body));
    let text: String = lines.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
    assert_eq!(text, expected);
    let (last, before) = lines.split_last().unwrap();
    assert!(before.iter().all(|line| line["done"] == false) && last["done"] == true);
    assert_eq!((&last["prompt_eval_count"], &last["eval_count"]), (&whole["prompt_eval_count"], &json!(7)));
    let date = last["created_at"].as_str().unwrap();
    assert!(date.len() == 20 && date.starts_with("20") && date.ends_with('Z'), "{date}");
}

#[test]
fn a_text_is_completed_with_and_without_a_template() {
    let door = Door::open();
    let options = json!({"temperature": 0, "num_predict": 8});
    let text = |body: Value| {
        let whole = door.post("/api/generate", &body).json();
        whole["response"].as_str().unwrap_or_else(|| panic!("{whole}")).to_owned()
    };
    let story = json!({"model": TINY, "prompt": "Once upon a time", "options": options, "stream": false});
    assert_eq!(text(story.clone()), ", there was a little girl", "the model has no template");
    let chat = |messages: &[(&str, &str)]| {
        let messages = messages
            .iter()
            .map(|(role, content)| ChatMessage { role: (*role).to_owned(), content: (*content).to_owned() });
        let request = GenerateRequest::new(CHATTY, Prompt::Chat(messages.collect()));
        direct(&door, &GenerateRequest { max_tokens: 8, ..request })
    };
    let body = |more: Value| {
        let mut body = json!({"model": CHATTY, "prompt": "ab", "options": options, "stream": false});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    assert_eq!(text(body(json!({}))), chat(&[("user", "ab")]));
    assert_eq!(text(body(json!({"system": "b"}))), chat(&[("system", "b"), ("user", "ab")]));
    let raw = GenerateRequest { max_tokens: 8, ..GenerateRequest::new(CHATTY, Prompt::Text("ab".into())) };
    assert_eq!(text(body(json!({"raw": true}))), direct(&door, &raw));
    let lines = lines(
        &door
            .post("/api/generate", &json!({"model": TINY, "prompt": "Once upon a time", "options": options})),
    );
    let streamed: String = lines.iter().map(|line| line["response"].as_str().unwrap()).collect();
    assert_eq!(streamed, ", there was a little girl");
    // Without a prompt, the model is loaded.
    let loaded = door.post("/api/generate", &json!({"model": ENDLESS})).json();
    assert_eq!((&loaded["done_reason"], &loaded["response"]), (&json!("load"), &json!("")));
    let ps = door.get("/api/ps").json();
    assert!(ps["models"].as_array().unwrap().iter().any(|model| model["name"] == ENDLESS), "{ps}");
}

#[test]
fn models_are_listed_and_shown() {
    let door = Door::open();
    let tags = door.get("/api/tags").json();
    let names: Vec<&str> =
        tags["models"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, [CHATTY, ENDLESS, TINY]);
    let size = std::fs::metadata(door.rig.model(TINY)).unwrap().len();
    assert_eq!(tags["models"][2]["size"], size);
    let digest = tags["models"][2]["digest"].as_str().unwrap();
    assert_eq!((digest.len(), digest.bytes().all(|byte| byte.is_ascii_hexdigit())), (64, true));
    assert_ne!(tags["models"][1]["digest"], digest);
    let shown = door.post("/api/show", &json!({"model": TINY})).json();
    // As Ollama's own program asks.
    let own = json!({"model": "", "system": "", "template": "", "options": null, "name": TINY});
    assert_eq!(door.post("/api/show", &own).json(), shown);
    let refused = door.post("/api/show", &json!({"model": TINY, "system": "be brief"}));
    assert_eq!(refused.status, 400);
    assert_eq!(shown["details"]["family"], "llama");
    assert_eq!(shown["details"]["quantization_level"], "F32");
    assert_eq!(shown["model_info"]["llama.context_length"], 512);
    assert_eq!(shown["model_info"]["llama.block_count"], 5);
    assert!(door.get("/api/version").json()["version"].is_string());
}

#[test]
fn abilities_that_are_missing_are_refused_with_their_reason() {
    let door = Door::open();
    let pull = door.post("/api/pull", &json!({"model": "a"}));
    assert_eq!(pull.status, 501);
    assert!(pull.json()["error"].as_str().unwrap().contains("no network"), "{}", pull.body);
    let good = json!({"model": CHATTY, "messages": [{"role": "user", "content": "ab"}], "stream": false});
    for (name, value) in [
        ("format", json!("xml")),
        ("tools[0].function", json!([{}])),
        ("think", json!("high")),
        ("invented", json!(1)),
        ("options.repeat_penalty", json!({"repeat_penalty": 0})),
        ("options.num_ctx", json!({"num_ctx": 1_000_000})),
        ("options.num_predict", json!({"num_predict": -3})),
        ("options.invented", json!({"invented": 1})),
        ("messages[0].images", json!([{"role": "user", "content": "a", "images": ["x"]}])),
    ] {
        let mut body = good.clone();
        body[name.split(['.', '[']).next().unwrap()] = value;
        let response = door.post("/api/chat", &body);
        assert_eq!(response.status, 400, "{name}: {}", response.body);
        assert!(response.json()["error"].as_str().unwrap().starts_with(name), "{name}: {}", response.body);
    }
    let missing = door.post("/api/generate", &json!({"model": "none", "prompt": "a"}));
    assert_eq!(missing.status, 404);
    assert!(missing.json()["error"].is_string());
}
