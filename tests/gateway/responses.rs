//! OpenAI's responses: whole and in events, and kept for the requests that go on with them.

use rocmforge_gateway::{Settings, Tokens};
use serde_json::{Value, json};

use crate::door::{CHATTY, Door};
use crate::http::Response;

const PATH: &str = "/v1/responses";

fn with(mut body: Value, more: &Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// A greedy request of six tokens.
fn asked(more: &Value) -> Value {
    with(json!({"model": CHATTY, "temperature": 0, "max_output_tokens": 6}), more)
}

#[track_caller]
fn answered(door: &Door, more: &Value) -> Value {
    let response = door.post(PATH, &asked(more));
    assert_eq!(response.status, 200, "{}", response.body);
    response.json()
}

/// The text of a response whose only item is a message.
#[track_caller]
fn text(response: &Value) -> &str {
    let [item] = response["output"].as_array().unwrap().as_slice() else { panic!("{response}") };
    assert_eq!((&item["type"], &item["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(item["content"][0]["type"], "output_text", "{item}");
    item["content"][0]["text"].as_str().unwrap()
}

/// Text and tokens of the same chat in the older API, which other tests compare with the daemon's own answer.
fn chatted(door: &Door, messages: &[(&str, &str)]) -> (String, u64, u64) {
    let messages: Vec<Value> =
        messages.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
    let body = json!({"model": CHATTY, "temperature": 0, "max_tokens": 6, "messages": messages});
    let whole = door.post("/v1/chat/completions", &body).json();
    let usage = |name: &str| whole["usage"][name].as_u64().unwrap();
    let content = whole["choices"][0]["message"]["content"].as_str().unwrap();
    (content.to_owned(), usage("prompt_tokens"), usage("completion_tokens"))
}

/// The events of a stream, each under its own name.
#[track_caller]
fn events(response: &Response) -> Vec<Value> {
    assert_eq!(response.header("content-type"), Some("text/event-stream"), "{response:?}");
    let events = response.body.split_terminator("\n\n").enumerate().map(|(number, event)| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        assert_eq!(data["sequence_number"], number);
        data
    });
    events.collect()
}

fn send(door: &Door, method: &str, path: &str, headers: &str, body: &str) -> Response {
    let mut connection = door.connect();
    let length = body.len();
    connection.send(&format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
    ));
    connection.response().expect("a response")
}

#[test]
fn a_response_has_the_chats_text_and_counts() {
    let door = Door::open();
    let (expected, prompt, answer) = chatted(&door, &[("system", "ab"), ("user", "bab")]);
    let items = json!([{"role": "user", "content": [{"type": "input_text", "text": "ba"}, {"type": "input_text", "text": "b"}]}]);
    for input in [json!("bab"), items] {
        let whole = answered(&door, &json!({"input": input, "instructions": "ab", "metadata": {"a": "b"}}));
        assert_eq!(text(&whole), expected);
        assert_eq!(
            (&whole["usage"]["input_tokens"], &whole["usage"]["output_tokens"]),
            (&json!(prompt), &json!(answer))
        );
        assert_eq!(whole["usage"]["output_tokens_details"]["reasoning_tokens"], 0);
        assert_eq!((&whole["status"], &whole["object"]), (&json!("incomplete"), &json!("response")));
        assert_eq!(whole["incomplete_details"]["reason"], "max_output_tokens");
        assert_eq!(whole["output"][0]["status"], "incomplete");
        assert_eq!((&whole["instructions"], &whole["metadata"]), (&json!("ab"), &json!({"a": "b"})));
        assert_eq!((&whole["model"], &whole["temperature"]), (&json!(CHATTY), &json!(0)));
    }
    door.rig.assert_idle();
}

#[test]
fn a_stream_tells_the_same_response_in_events() {
    let door = Door::open();
    let whole = answered(&door, &json!({"input": "ab"}));
    let response = door.post(PATH, &asked(&json!({"input": "ab", "stream": true})));
    let told = events(&response);
    let kinds: Vec<&str> = told.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds[..2], ["response.created", "response.in_progress"]);
    assert_eq!(kinds[2..4], ["response.output_item.added", "response.content_part.added"]);
    let last = [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ];
    assert_eq!(kinds[kinds.len() - 4..], last);
    let deltas = told.iter().filter(|event| event["type"] == "response.output_text.delta");
    let deltas: String = deltas.map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!(deltas, text(&whole));
    assert_eq!(told[told.len() - 4]["text"], text(&whole));
    let end = &told[told.len() - 1]["response"];
    assert_eq!((text(end), &end["usage"]["output_tokens"]), (text(&whole), &whole["usage"]["output_tokens"]));
    assert_eq!(told[0]["response"]["id"], end["id"]);
    assert_eq!(
        (&told[0]["response"]["status"], &told[0]["response"]["output"]),
        (&json!("in_progress"), &json!([]))
    );
    assert_eq!(end["output"][0]["id"], told[2]["item"]["id"]);
    let kept = door.get(&format!("{PATH}/{}", end["id"].as_str().unwrap()));
    assert_eq!((kept.status, &kept.json()), (200, end));
}

#[test]
fn a_request_goes_on_with_an_earlier_response() {
    let door = Door::open();
    let first = answered(&door, &json!({"input": "ab", "instructions": "a"}));
    let id = first["id"].as_str().unwrap();
    let more = json!({"input": "b", "instructions": "bb", "previous_response_id": id});
    let second = answered(&door, &more);
    // Instructions are not carried on.
    let (expected, prompt, _) =
        chatted(&door, &[("system", "bb"), ("user", "ab"), ("assistant", text(&first)), ("user", "b")]);
    assert_eq!((text(&second), &second["usage"]["input_tokens"]), (expected.as_str(), &json!(prompt)));
    assert_eq!(second["previous_response_id"], id);
    let third = answered(&door, &json!({"input": "ba", "previous_response_id": second["id"]}));
    let all = [
        ("user", "ab"),
        ("assistant", text(&first)),
        ("user", "b"),
        ("assistant", text(&second)),
        ("user", "ba"),
    ];
    let (expected, prompt, _) = chatted(&door, &all);
    assert_eq!((text(&third), &third["usage"]["input_tokens"]), (expected.as_str(), &json!(prompt)));

    let place = format!("{PATH}/{id}");
    assert_eq!(door.get(&place).json(), first);
    assert_eq!(
        send(&door, "DELETE", &place, "", "").json(),
        json!({"id": id, "object": "response", "deleted": true})
    );
    for response in [door.get(&place), send(&door, "DELETE", &place, "", "")] {
        assert_eq!(
            (response.status, &response.json()["error"]["type"]),
            (404, &json!("invalid_request_error"))
        );
    }
    let gone = door.post(PATH, &asked(&more));
    let error = gone.json()["error"].clone();
    assert_eq!((gone.status, &error["code"]), (400, &json!("previous_response_not_found")), "{error}");
    assert_eq!(error["param"], "previous_response_id");
    // Later ones hold the whole conversation.
    answered(&door, &json!({"input": "a", "previous_response_id": third["id"]}));
}

#[test]
fn responses_that_shall_not_be_kept_are_not() {
    let door = Door::open();
    for stream in [false, true] {
        let response = door.post(PATH, &asked(&json!({"input": "ab", "store": false, "stream": stream})));
        let whole = match stream {
            false => response.json(),
            true => events(&response).pop().unwrap()["response"].clone(),
        };
        assert_eq!(whole["store"], false);
        assert_eq!(door.get(&format!("{PATH}/{}", whole["id"].as_str().unwrap())).status, 404);
    }
}

#[test]
fn callers_of_one_token_do_not_see_those_of_another() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tokens");
    let tokens = ["0123456789abcdef", "fedcba9876543210"];
    std::fs::write(&file, tokens.join("\n")).unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let door = Door::open_with("127.0.0.1:0", Some(Tokens::read(&file).unwrap()), Settings::default());
    let of = |token: &str, method: &str, path: &str, body: &str| {
        send(&door, method, path, &format!("Authorization: Bearer {token}\r\n"), body)
    };
    let first = of(tokens[0], "POST", PATH, &asked(&json!({"input": "ab"})).to_string()).json();
    let place = format!("{PATH}/{}", first["id"].as_str().unwrap());
    let more = asked(&json!({"input": "b", "previous_response_id": first["id"]})).to_string();
    assert_eq!(of(tokens[1], "GET", &place, "").status, 404);
    assert_eq!(of(tokens[1], "DELETE", &place, "").status, 404);
    assert_eq!(of(tokens[1], "POST", PATH, &more).status, 400);
    assert_eq!(of(tokens[0], "GET", &place, "").status, 200);
    assert_eq!(of(tokens[0], "POST", PATH, &more).status, 200);
}

#[test]
fn calls_are_items_and_their_results_go_back() {
    let door = Door::open();
    let schema = json!({"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"], "additionalProperties": false});
    let tools = json!([{"type": "function", "name": "buy", "description": "Buys a pet.", "parameters": schema, "strict": true}]);
    let demand = json!({"input": "ab", "tools": tools, "tool_choice": {"type": "function", "name": "buy"}, "max_output_tokens": 500});
    let whole = answered(&door, &demand);
    let [call] = whole["output"].as_array().unwrap().as_slice() else { panic!("{whole}") };
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("buy")));
    assert_eq!((&whole["status"], &call["status"]), (&json!("completed"), &json!("completed")));
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(arguments == json!({"kind": "cat"}) || arguments == json!({"kind": "dog"}), "{arguments}");
    let told = events(&door.post(PATH, &asked(&with(demand, &json!({"stream": true})))));
    let done = told.iter().find(|event| event["type"] == "response.function_call_arguments.done").unwrap();
    assert_eq!(done["arguments"], call["arguments"]);
    assert_eq!(told[told.len() - 1]["type"], "response.completed");

    // The call and its result, both sent, and with the call kept by the gateway.
    let output = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "sold"});
    let user = json!({"role": "user", "content": "ab"});
    let sent = answered(&door, &json!({"input": [user, call, output], "tools": tools}));
    let kept =
        answered(&door, &json!({"input": [output], "tools": tools, "previous_response_id": whole["id"]}));
    assert_eq!(sent["usage"]["input_tokens"], kept["usage"]["input_tokens"]);
    let chat = json!({"model": CHATTY, "max_tokens": 1, "messages": [user,
        {"role": "assistant", "tool_calls": [{"id": call["call_id"], "type": "function",
            "function": {"name": "buy", "arguments": call["arguments"]}}]},
        {"role": "tool", "tool_call_id": call["call_id"], "content": "sold"}],
        "tools": [{"type": "function", "function": {"name": "buy", "description": "Buys a pet.", "parameters": schema}}]});
    let chat = door.post("/v1/chat/completions", &chat).json();
    assert_eq!(sent["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
}

#[test]
fn an_answer_keeps_to_its_schema() {
    let door = Door::open();
    let schema = json!({"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "name": "pet", "schema": schema, "strict": true});
    for seed in 0..3 {
        let more = json!({"input": "ab", "text": {"format": format}, "temperature": 1, "seed": seed, "max_output_tokens": 200});
        let whole = answered(&door, &more);
        let pet: Value = serde_json::from_str(text(&whole)).unwrap();
        assert!(pet == json!({"kind": "cat"}) || pet == json!({"kind": "dog"}), "{pet}");
        assert_eq!(whole["status"], "completed");
    }
}

#[test]
fn fields_of_responses_that_cannot_be_honoured_are_named() {
    let door = Door::open();
    for (name, value) in [
        ("input", json!(null)),
        ("input", json!(7)),
        ("input", json!([])),
        ("input[0].type", json!([{"type": "item_reference", "id": "x"}])),
        ("background", json!(true)),
        ("conversation", json!("conv_1")),
        ("prompt", json!({"id": "pmpt_1"})),
        ("truncation", json!("auto")),
        ("top_logprobs", json!(2)),
        ("include", json!(["message.output_text.logprobs"])),
        ("max_output_tokens", json!(0)),
        ("previous_response_id", json!("resp_1")),
        ("reasoning.effort", json!({"effort": "high"})),
        ("reasoning.summary", json!({"summary": "detailed"})),
        ("text.verbosity", json!({"verbosity": "low"})),
        ("text.format.type", json!({"format": {"type": "xml"}})),
        ("tools[0].type", json!([{"type": "web_search"}])),
        ("tools[0].name", json!([{"type": "function"}])),
        ("tool_choice", json!("required")),
        ("tool_choice", json!({"type": "allowed_tools"})),
        ("store", json!("yes")),
        ("invented", json!(1)),
    ] {
        let field = name.split(['.', '[']).next().unwrap();
        door.post(PATH, &asked(&with(json!({"input": "ab"}), &json!({field: value})))).blames(name);
    }
    let whole = answered(&door, &json!({"input": "ab"}));
    let place = format!("{PATH}/{}", whole["id"].as_str().unwrap());
    assert_eq!(door.get(&format!("{place}?stream=true")).json()["error"]["param"], "stream");
    assert_eq!(door.get(&format!("{place}/input_items")).status, 404);
    assert_eq!(door.get(PATH).status, 405);
    let long = asked(&json!({"input": "ab", "metadata": {"a": "b".repeat(1 << 20)}}));
    assert_eq!(door.post(PATH, &long).status, 413, "the response would repeat it");
    assert_eq!(send(&door, "DELETE", &place, "", "{}").status, 400, "a body");
    assert_eq!(send(&door, "DELETE", "/v1/models/chatty", "", "").status, 405);
}
