//! OpenAI's API.

use rocmforge_client::wire::{ChatMessage, GenerateRequest, Prompt, SamplingOptions};
use serde_json::{Value, json};

use crate::door::{CHATTY, Door, ENDLESS};
use crate::rig::{Answer, TINY, collect, story};

/// The daemon's own answer, and the tokens of prompt and answer.
#[track_caller]
fn direct(door: &Door, request: &GenerateRequest) -> Answer {
    collect(&mut door.rig.client().generate(request).unwrap()).unwrap()
}

fn chat_of(messages: &[(&str, &str)], max_tokens: u32) -> GenerateRequest {
    let messages = messages
        .iter()
        .map(|(role, content)| ChatMessage { role: (*role).to_owned(), content: (*content).to_owned() });
    GenerateRequest { max_tokens, ..GenerateRequest::new(CHATTY, Prompt::Chat(messages.collect())) }
}

/// The texts of a chat's stream.
fn contents(events: &[Value]) -> String {
    events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect()
}

#[test]
fn models_are_listed_by_name() {
    let door = Door::open();
    let list = door.get("/v1/models").json();
    let names: Vec<&str> =
        list["data"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap()).collect();
    assert_eq!((list["object"].as_str(), names), (Some("list"), vec![CHATTY, ENDLESS, TINY]));
    assert_eq!(door.get("/v1/models/tin%79").json()["id"], TINY);
    let missing = door.get("/v1/models/none");
    assert_eq!((missing.status, &missing.json()["error"]["code"]), (404, &json!("model_not_found")));
    assert_eq!(door.get("/health").json(), json!({"status": "ok"}));
}

#[test]
fn a_chat_has_the_daemons_text_and_counts() {
    let door = Door::open();
    let expected =
        direct(&door, &chat_of(&[("system", "ab"), ("user", "bab"), ("assistant", "a"), ("user", "b")], 9));
    let body = json!({
        "model": CHATTY,
        "messages": [
            {"role": "developer", "content": "ab"},
            {"role": "user", "content": [{"type": "text", "text": "ba"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "a", "refusal": null, "tool_calls": []},
            {"role": "user", "content": "b"},
        ],
        "temperature": 0,
        "max_completion_tokens": 9,
        "n": 1, "user": "me", "frequency_penalty": 0, "tools": null, "response_format": {"type": "text"},
    });
    let response = door.post("/v1/chat/completions", &body);
    assert_eq!((response.status, response.header("content-type")), (200, Some("application/json")));
    let whole = response.json();
    assert_eq!(whole["choices"][0]["message"]["content"], expected.text.as_str());
    assert_eq!(whole["choices"][0]["message"]["role"], "assistant");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!((&whole["object"], &whole["model"]), (&json!("chat.completion"), &json!(CHATTY)));
    assert_eq!(whole["usage"]["prompt_tokens"], expected.prompt_ids.len());
    assert_eq!(whole["usage"]["completion_tokens"], 9);
    assert_eq!(whole["usage"]["total_tokens"], expected.prompt_ids.len() + 9);

    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let events = door.post("/v1/chat/completions", &streamed).events();
    assert_eq!(contents(&events), expected.text);
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let [.., last, usage] = events.as_slice() else { panic!("too few events") };
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(9)));
    let id = &events[0]["id"];
    assert!(events.iter().all(|event| event["id"] == *id && event["object"] == "chat.completion.chunk"));
    assert!(events[..events.len() - 1].iter().all(|event| event["usage"].is_null()));
    streamed["stream_options"] = json!(null);
    let events = door.post("/v1/chat/completions", &streamed).events();
    assert!(events.iter().all(|event| event.get("usage").is_none()), "usage only where it is asked for");
}

#[test]
fn a_completion_has_the_daemons_text_and_stops_where_it_is_told() {
    let door = Door::open();
    let body = |more: Value| {
        let mut body =
            json!({"model": TINY, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let text = |more: Value| {
        let whole = door.post("/v1/completions", &body(more)).json();
        let choice = &whole["choices"][0];
        (choice["text"].as_str().unwrap().to_owned(), choice["finish_reason"].as_str().unwrap().to_owned())
    };
    let story = direct(&door, &story(8));
    assert_eq!(story.text, ", there was a little girl");
    let length = (story.text.clone(), "length".to_owned());
    assert_eq!(text(json!({})), length);
    assert_eq!(text(json!({"prompt": ["Once upon a time"], "stop": ["never"]})), length);
    assert_eq!(text(json!({"prompt": story.prompt_ids})), length, "token ids are taken as they are");
    assert_eq!(text(json!({"prompt": [story.prompt_ids]})), length);
    assert_eq!(text(json!({"stop": " little"})), (", there was a".to_owned(), "stop".to_owned()));
    assert_eq!(text(json!({"stop": ["girl", " was"]})), (", there".to_owned(), "stop".to_owned()));
    let streamed = door.post("/v1/completions", &body(json!({"stream": true}))).events();
    let pieces = streamed.iter().map(|event| event["choices"][0]["text"].as_str().unwrap());
    assert_eq!(pieces.collect::<String>(), story.text);
    // Without a number, the answer has 16 tokens, as the API has it.
    let mut default = body(json!({}));
    default.as_object_mut().unwrap().remove("max_tokens");
    assert_eq!(door.post("/v1/completions", &default).json()["usage"]["completion_tokens"], 16);
}

#[test]
fn options_of_sampling_reach_the_daemon() {
    let door = Door::open();
    let sampling = SamplingOptions {
        temperature: 1.5,
        top_p: 0.9,
        min_p: 0.01,
        top_k: 40,
        seed: Some(7),
        top_logprobs: 0,
    };
    let expected = direct(&door, &GenerateRequest { sampling, ignore_eog: false, ..story(12) });
    let mut body = json!({
        "model": TINY, "prompt": "Once upon a time", "max_tokens": 12,
        "temperature": 1.5, "top_p": 0.9, "min_p": 0.01, "top_k": 40, "seed": 7,
    });
    let text = |body: &Value| door.post("/v1/completions", body).json()["choices"][0]["text"].clone();
    assert_eq!(text(&body), expected.text.as_str());
    body["seed"] = json!(8);
    assert_ne!(text(&body), expected.text.as_str(), "the seed is used");
}

#[test]
fn log_probabilities_have_the_texts_of_their_tokens() {
    let door = Door::open();
    let sampling = SamplingOptions { top_logprobs: 2, ..SamplingOptions::default() };
    let mut generation = door.rig.client().generate(&GenerateRequest { sampling, ..story(8) }).unwrap();
    let mut expected = Vec::new();
    while let Some(item) = generation.next_item().unwrap() {
        expected.extend(item.logprobs);
    }
    let body = json!({"model": TINY, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8, "logprobs": 2});
    let whole = door.post("/v1/completions", &body).json();
    let logprobs = &whole["choices"][0]["logprobs"];
    let tokens: Vec<&str> =
        logprobs["tokens"].as_array().unwrap().iter().map(|one| one.as_str().unwrap()).collect();
    assert_eq!(tokens, [",", " there", " was", " a", " little", " g", "ir", "l"]);
    assert_eq!(tokens.concat(), whole["choices"][0]["text"]);
    assert_eq!(logprobs["text_offset"], json!([0, 1, 7, 11, 13, 20, 22, 24]));
    for (at, expected) in expected.iter().enumerate() {
        let close = |value: &Value| (value.as_f64().unwrap() - f64::from(expected.logprob)).abs() < 1e-12;
        assert!(close(&logprobs["token_logprobs"][at]), "{logprobs}");
        let top = logprobs["top_logprobs"][at].as_object().unwrap();
        assert!(top.len() == 2 && close(&top[tokens[at]]), "{top:?}");
    }
    let mut chat = json!({
        "model": CHATTY, "messages": [{"role": "user", "content": "ab"}], "temperature": 0, "max_tokens": 5,
        "logprobs": true,
    });
    let content = |chat: &Value| {
        let whole = door.post("/v1/chat/completions", chat).json();
        whole["choices"][0]["logprobs"]["content"].as_array().unwrap().clone()
    };
    let without = content(&chat);
    assert_eq!(without.len(), 5);
    assert!(
        without
            .iter()
            .all(|token| token["top_logprobs"] == json!([]) && token["logprob"].as_f64().unwrap() < 0.0)
    );
    chat["top_logprobs"] = json!(3);
    for (token, alone) in content(&chat).iter().zip(&without) {
        assert_eq!((&token["token"], &token["logprob"]), (&alone["token"], &alone["logprob"]));
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 3);
        assert_eq!(
            token["top_logprobs"][0]["token"], token["token"],
            "a greedy token is the most likely one"
        );
    }
    chat["stream"] = json!(true);
    let events = door.post("/v1/chat/completions", &chat).events();
    let streamed: usize = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
        .map(Vec::len)
        .sum();
    assert_eq!(streamed, 5);
}

#[test]
fn fields_that_cannot_be_honoured_are_refused_by_name() {
    let door = Door::open();
    let good = json!({"model": CHATTY, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 1});
    let part = json!({"type": "image_url", "image_url": {"url": "data:"}});
    let cases = [
        ("n", json!(9)),
        ("frequency_penalty", json!(2.5)),
        ("logit_bias", json!({"5": 101})),
        ("tools[0].function", json!([{"type": "function"}])),
        ("tools[0].type", json!([{"type": "web_search"}])),
        ("tool_choice", json!("required")),
        ("response_format.type", json!({"type": "xml"})),
        ("reasoning_effort", json!("high")),
        ("temperature", json!(2.5)),
        ("temperature", json!("warm")),
        ("top_p", json!(-0.1)),
        ("max_tokens", json!(0)),
        ("max_tokens", json!(1.5)),
        ("top_logprobs", json!(3)),
        ("stop", json!(vec!["a"; 17])),
        ("stop", json!("")),
        ("seed", json!("x")),
        ("stream", json!(1)),
        ("stream_options.exclude", json!(true)),
        ("messages", json!([])),
        ("messages", json!("hello")),
        ("messages[0].tool_call_id", json!([{"role": "tool", "content": "1"}])),
        ("messages[0].role", json!([{"role": "critic", "content": "1"}])),
        ("messages[0].content", json!([{"role": "user"}])),
        ("messages[0].name", json!([{"role": "user", "content": "a", "name": "bob"}])),
        ("messages[0].content[0].type", json!([{"role": "user", "content": [part]}])),
        ("model", json!(null)),
        ("invented", json!(1)),
    ];
    for (name, value) in cases {
        let mut body = good.clone();
        let field = name.split(['.', '[']).next().unwrap();
        body[field] = if name == "stream_options.exclude" { json!({"exclude": value}) } else { value };
        door.post("/v1/chat/completions", &body).blames(name);
    }
    for (name, value) in [
        ("echo", json!(1)),
        ("suffix", json!("end")),
        ("best_of", json!(3)),
        ("prompt", json!(["a", "b"])),
        ("prompt", json!([[1], [2]])),
        ("prompt", json!([1, -1])),
        ("prompt", json!({})),
    ] {
        let mut body = json!({"model": TINY, "prompt": "a", "max_tokens": 1});
        body[name] = value;
        let response = door.post("/v1/completions", &body);
        assert_eq!((response.status, &response.json()["error"]["param"]), (400, &json!(name)));
    }
}

#[test]
fn refusals_of_the_daemon_keep_their_words() {
    let door = Door::open();
    let chat = |model: &str| json!({"model": model, "messages": [{"role": "user", "content": "ab"}]});
    for stream in [false, true] {
        let mut body = chat("none");
        body["stream"] = json!(stream);
        let missing = door.post("/v1/chat/completions", &body);
        let error = &missing.json()["error"];
        assert_eq!(
            (missing.status, &error["code"]),
            (404, &json!("model_not_found")),
            "also before a stream"
        );
        assert!(error["message"].as_str().unwrap().contains("none"), "{error}");
    }
    let bare = door.post("/v1/chat/completions", &chat(TINY));
    assert_eq!((bare.status, &bare.json()["error"]["code"]), (400, &json!("NoChatTemplate")));
    let long = json!({"model": TINY, "prompt": "a ".repeat(2000)});
    let long = door.post("/v1/completions", &long);
    assert_eq!((long.status, &long.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
    let huge = json!({"model": TINY, "prompt": "a".repeat(2 << 20)});
    assert_eq!(door.post("/v1/completions", &huge).status, 413, "more than a frame of the daemon holds");
    for (method, path, status) in [
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models/tiny", 405),
        ("POST", "/v1/images/generations", 404),
        ("GET", "/v2", 404),
    ] {
        let mut connection = door.connect();
        connection.send(&format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"));
        assert_eq!(connection.response().unwrap().status, status, "{method} {path}");
    }
}
