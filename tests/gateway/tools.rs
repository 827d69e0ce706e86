//! Tools through all APIs: demanded calls keep to their schemas, and results go back to the model.

use rocmforge_gateway::Settings;
use serde_json::{Value, json};

use crate::common;
use crate::door::{CHATTY, Door};
use crate::rig::Rig;

/// A model whose template knows tools, in the form of Hermes and Qwen.
const CALLER: &str = "caller";

const TEMPLATE: &str = "{% if tools %}{{ tools|tojson }}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content if m.content is not none }}\
    {% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments|tojson }}{% endfor %};{% endfor %}assistant:";

fn door() -> Door {
    let plain = TEMPLATE.replace("tools", "t").replace("tool_calls", "c");
    Door::of_templates(&[(CALLER, TEMPLATE), (CHATTY, &plain)])
}

fn schema() -> Value {
    json!({"type": "object", "additionalProperties": false, "required": ["size", "kind"],
        "properties": {"size": {"type": "integer", "minimum": 1, "maximum": 99}, "kind": {"$ref": "#/$defs/kind"}},
        "$defs": {"kind": {"enum": ["cat", "dog"]}}})
}

fn check(arguments: &Value) {
    assert!((1..=99).contains(&arguments["size"].as_u64().unwrap_or_default()), "{arguments}");
    assert!(arguments["kind"] == "cat" || arguments["kind"] == "dog", "{arguments}");
    assert_eq!(arguments.as_object().unwrap().len(), 2, "{arguments}");
}

fn function(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "description": "Buys a pet.", "parameters": schema()}})
}

fn user() -> Value {
    json!([{"role": "user", "content": "ab"}])
}

#[test]
fn openais_clients_get_the_calls_that_they_demand() {
    let door = door();
    for (model, seed) in [(CALLER, 1), (CALLER, 2), (CHATTY, 3), (CHATTY, 4)] {
        let named = json!({"type": "function", "function": {"name": "sell"}});
        for (choice, names) in [(json!("required"), ["buy", "sell"]), (named, ["sell", "sell"])] {
            let mut body = json!({"model": model, "messages": user(), "seed": seed, "tool_choice": choice,
                "tools": [function("buy"), function("sell")]});
            let whole = door.post("/v1/chat/completions", &body).json();
            let choice = &whole["choices"][0];
            assert_eq!(choice["finish_reason"], "tool_calls", "{whole}");
            assert_eq!(choice["message"]["content"], Value::Null, "{whole}");
            let calls = choice["message"]["tool_calls"].as_array().unwrap();
            for call in calls {
                assert!(names.contains(&call["function"]["name"].as_str().unwrap()), "{call}");
                assert!(call["type"] == "function" && call["id"].as_str().unwrap().starts_with("call_"));
                check(&serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap());
            }
            body["stream"] = json!(true);
            let events = door.post("/v1/chat/completions", &body).events();
            let deltas =
                events.iter().filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array());
            let mut pieces = 0;
            let mut streamed = vec![(String::new(), String::new()); calls.len()];
            for delta in deltas.flatten() {
                let (name, arguments) = &mut streamed[delta["index"].as_u64().unwrap() as usize];
                name.push_str(delta["function"]["name"].as_str().unwrap_or_default());
                arguments.push_str(delta["function"]["arguments"].as_str().unwrap());
                pieces += 1;
            }
            assert!(pieces > 2 * calls.len(), "{pieces} deltas of {} calls", calls.len());
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            let of_whole = calls
                .iter()
                .map(|call| (text(&call["function"]["name"]), text(&call["function"]["arguments"])));
            assert_eq!(streamed, of_whole.collect::<Vec<_>>(), "the same calls in pieces");
            assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
        }
        let one = json!({"model": model, "messages": user(), "seed": seed, "tool_choice": "required", "parallel_tool_calls": false,
            "tools": [function("buy")]});
        let whole = door.post("/v1/chat/completions", &one).json();
        assert_eq!(whole["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1, "{whole}");
    }
}

/// Tokens of a prompt, which tell whether the template saw something.
fn prompt_tokens(door: &Door, more: &Value) -> u64 {
    let mut body = json!({"model": CALLER, "messages": user(), "max_tokens": 1});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let whole = door.post("/v1/chat/completions", &body).json();
    whole["usage"]["prompt_tokens"].as_u64().unwrap_or_else(|| panic!("{whole}"))
}

#[test]
fn tools_and_their_results_are_seen_by_the_template() {
    let door = door();
    let bare = prompt_tokens(&door, &json!({}));
    let tools = json!([function("buy")]);
    assert!(prompt_tokens(&door, &json!({"tools": tools})) > bare);
    assert_eq!(prompt_tokens(&door, &json!({"tools": tools, "tool_choice": "none"})), bare);
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "buy", "arguments": "{\"size\": 3}"}});
    let messages = json!([
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sold"},
    ]);
    // One token for each character: the vocabulary has bytes, "a", "b" and "ab".
    let said = "assistant:buy{\"size\": 3};tool:sold;".len() as u64 - 1;
    assert!(prompt_tokens(&door, &json!({"messages": messages})).abs_diff(bare + said) <= 3);

    let refused = |path: &str, body: Value| door.post(path, &body).json()["error"].clone();
    let chat = |more: Value| {
        let mut body = json!({"model": CALLER, "messages": user(), "max_tokens": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        refused("/v1/chat/completions", body)["param"].clone()
    };
    let unknown = json!({"type": "function", "function": {"name": "none"}});
    assert_eq!(chat(json!({"tools": tools, "tool_choice": unknown})), "tool_choice");
    assert_eq!(chat(json!({"tools": [function("f"), function("f")]})), "tools[1]");
    assert_eq!(chat(json!({"tools": vec![function("f"); 129]})), "tools");
    assert_eq!(chat(json!({"tools": tools, "grammar": "root ::= \"a\""})), "grammar");
    let mut broken = messages;
    broken[1]["tool_calls"][0]["function"]["arguments"] = json!("{");
    assert_eq!(chat(json!({"messages": broken})), "messages[1].tool_calls[0].function.arguments");
}

#[test]
fn anthropics_clients_get_blocks_of_calls() {
    let door = door();
    let mut body = json!({
        "model": CALLER, "max_tokens": 500, "messages": user(), "top_k": 1,
        "tools": [{"name": "buy", "description": "Buys a pet.", "input_schema": schema()}],
        "tool_choice": {"type": "tool", "name": "buy", "disable_parallel_tool_use": true},
    });
    let whole = door.post("/v1/messages", &body).json();
    let [block] = whole["content"].as_array().unwrap().as_slice() else { panic!("{whole}") };
    assert_eq!(
        (&block["type"], &block["name"], &whole["stop_reason"]),
        (&json!("tool_use"), &json!("buy"), &json!("tool_use"))
    );
    check(&block["input"]);
    body["stream"] = json!(true);
    let streamed = door.post("/v1/messages", &body).body;
    let data = streamed.lines().filter_map(|line| line.strip_prefix("data: "));
    let events: Vec<Value> = data.map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let deltas: Vec<&str> =
        events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert!(deltas.len() > 1, "{streamed}");
    names.dedup();
    let expected = [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(names, expected, "{streamed}");
    let input: Value = serde_json::from_str(&deltas.concat()).unwrap();
    assert_eq!(input, block["input"]);
    assert_eq!(events[events.len() - 2]["delta"]["stop_reason"], "tool_use");
    // The call and its result go back.
    body["stream"] = json!(false);
    body["tool_choice"] = json!({"type": "none"});
    body["max_tokens"] = json!(1);
    let used = json!({"type": "tool_use", "id": block["id"], "name": "buy", "input": block["input"]});
    let result = json!({"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "sold"}]});
    let before = door.post("/v1/messages", &body).json()["usage"]["input_tokens"].as_u64().unwrap();
    body["messages"] = json!([user()[0], {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result, {"type": "text", "text": "a"}]}]);
    let after = door.post("/v1/messages", &body).json();
    assert!(after["usage"]["input_tokens"].as_u64().unwrap() > before + 30, "{after}");
}

#[test]
fn ollamas_clients_get_calls_as_objects() {
    let door = door();
    let shown = door.post("/api/show", &json!({"model": CALLER})).json();
    assert_eq!(shown["capabilities"], json!(["completion", "tools"]));
    // Nothing demands a call in this API, so the model is free not to make one.
    let call = json!({"function": {"name": "buy", "arguments": {"size": 3}}});
    let messages = json!([user()[0], {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "buy", "content": "sold"}]);
    let mut body = json!({"model": CALLER, "messages": messages, "tools": [function("buy")], "think": false, "stream": false,
        "options": {"num_predict": 4}});
    let whole = door.post("/api/chat", &body).json();
    assert_eq!((&whole["done"], &whole["eval_count"]), (&json!(true), &json!(4)), "{whole}");
    body["format"] = json!({"type": "object", "properties": {"size": {"type": "nothing"}}});
    assert_eq!(door.post("/api/chat", &body).status, 400);
}

#[test]
fn smollm2_makes_a_valid_call_when_one_is_demanded() {
    let Some(path) = common::smollm2() else { return };
    let mut rig = Rig::idle();
    std::os::unix::fs::symlink(path, rig.model("smollm2")).unwrap();
    rig.configure("[device]\nbackend = 'cpu'\n");
    rig.run();
    let door = Door::before(rig, "127.0.0.1:0", None, Settings::default());
    let weather = json!({"type": "function", "function": {"name": "get_weather", "description": "Tells the weather of a city.",
        "parameters": {"type": "object", "additionalProperties": false, "required": ["city", "unit"], "properties": {
            "city": {"type": "string", "maxLength": 40}, "unit": {"enum": ["celsius", "fahrenheit"]}}}}});
    for seed in 1..=3 {
        let body = json!({
            "model": "smollm2", "seed": seed, "temperature": 1.0, "max_tokens": 200, "tools": [function("buy"), weather],
            "messages": [{"role": "user", "content": "What is the weather in Oslo, in celsius?"}],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        });
        let whole = door.post("/v1/chat/completions", &body).json();
        let call = &whole["choices"][0]["message"]["tool_calls"][0]["function"];
        let arguments: Value =
            serde_json::from_str(call["arguments"].as_str().unwrap_or_else(|| panic!("{whole}"))).unwrap();
        assert!(arguments["city"].as_str().is_some_and(|city| city.chars().count() <= 40), "{arguments}");
        assert!(["celsius", "fahrenheit"].contains(&arguments["unit"].as_str().unwrap()), "{arguments}");
    }
}

/// A schema whose values are no calls.
fn verdict() -> Value {
    json!({"type": "object", "additionalProperties": false, "required": ["good"], "properties": {"good": {"type": "boolean"}}})
}

/// Checks an answer that is a call of `buy` or a verdict; true if it is a call.
fn check_either(text: &str, input: Option<&Value>) -> bool {
    match input {
        Some(input) => check(input),
        None => {
            let said: Value = serde_json::from_str(text).unwrap();
            assert!(said["good"].is_boolean() && said.as_object().unwrap().len() == 1, "{text}");
        }
    }
    input.is_some()
}

#[test]
fn an_answer_beside_tools_is_a_call_or_keeps_to_its_schema() {
    let door = door();
    let mut called = [0, 0];
    for (model, seed) in (1..=8).flat_map(|seed| [(CALLER, seed), (CHATTY, seed)]) {
        let format = json!({"type": "json_schema", "json_schema": {"name": "verdict", "schema": verdict()}});
        let body = json!({"model": model, "messages": user(), "seed": seed, "temperature": 1,
            "tools": [function("buy")], "parallel_tool_calls": false, "response_format": format});
        let whole = door.post("/v1/chat/completions", &body).json();
        let choice = &whole["choices"][0];
        let text = choice["message"]["content"].as_str().unwrap_or_default();
        let input = choice["message"]["tool_calls"][0]["function"]["arguments"].as_str();
        let input = input.map(|text| serde_json::from_str(text).unwrap());
        let is_call = check_either(text, input.as_ref());
        assert_eq!(choice["finish_reason"], if is_call { "tool_calls" } else { "stop" }, "{whole}");
        called[usize::from(is_call)] += 1;
    }
    assert!(called[0] > 0 && called[1] > 0, "{called:?}");
}

#[test]
fn every_api_takes_a_schema_beside_tools() {
    let door = door();
    for model in [CALLER, CHATTY] {
        let post = |path: &str, mut body: Value| {
            body["model"] = json!(model);
            door.post(path, &body).json()
        };
        let format = json!({"format": {"type": "json_schema", "name": "verdict", "schema": verdict()}});
        let tool = json!({"type": "function", "name": "buy", "parameters": schema()});
        let whole =
            post("/v1/responses", json!({"input": "ab", "temperature": 1, "text": format, "tools": [tool]}));
        for item in whole["output"].as_array().unwrap() {
            let input = item["arguments"].as_str().map(|text| serde_json::from_str::<Value>(text).unwrap());
            check_either(item["content"][0]["text"].as_str().unwrap_or_default(), input.as_ref());
        }

        let format = json!({"format": {"type": "json_schema", "schema": verdict()}});
        let tool = json!({"name": "buy", "input_schema": schema()});
        let body = json!({"messages": user(), "max_tokens": 500, "temperature": 1, "tools": [tool], "output_config": format});
        let whole = post("/v1/messages", body);
        for block in whole["content"].as_array().unwrap() {
            check_either(block["text"].as_str().unwrap_or_default(), block.get("input"));
        }

        let body = json!({"messages": user(), "stream": false, "tools": [function("buy")], "format": verdict(), "options": {"temperature": 1}});
        let message = post("/api/chat", body)["message"].clone();
        let input = message["tool_calls"][0]["function"].get("arguments");
        check_either(message["content"].as_str().unwrap(), input);
    }
}
