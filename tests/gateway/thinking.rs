//! Reasoning is turned on and off by the APIs' own fields, in templates that know it.

use rocmforge_gateway::Settings;
use serde_json::{Value, json};

use crate::door::{CHATTY, Door};
use crate::forge::{Value as Meta, tiny_llama};
use crate::rig::Rig;

/// A model whose template writes one more `b` with reasoning, and two more without.
const THINKER: &str = "thinker";

const TEMPLATE: &str = "{% for m in messages %}{{ m.content }}{% endfor %}\
    {% if enable_thinking is defined %}{{ 'b' if enable_thinking else 'bb' }}{% endif %}";

fn door() -> Door {
    let mut rig = Rig::idle();
    for (name, template) in [(THINKER, TEMPLATE), (CHATTY, "{{ messages[0].content }}")] {
        let model = tiny_llama(3)
            .set("llama.context_length", Meta::u32(4096))
            .set("tokenizer.chat_template", Meta::string(template));
        std::fs::write(rig.model(name), model.build().bytes).unwrap();
    }
    rig.configure("[device]\nbackend = 'cpu'\n");
    rig.run();
    Door::before(rig, "127.0.0.1:0", None, Settings::default())
}

fn tokens(door: &Door, path: &str, field: &str, value: Value) -> u64 {
    let mut body =
        json!({"model": THINKER, "max_tokens": 1, "messages": [{"role": "user", "content": "ab"}]});
    body[field] = value;
    let reply = door.post(path, &body).json();
    let usage = &reply["usage"];
    usage["prompt_tokens"].as_u64().or(usage["input_tokens"].as_u64()).unwrap_or_else(|| panic!("{reply}"))
}

#[test]
fn each_apis_field_sets_the_templates_variable() {
    let door = door();
    let cases = [
        ("/v1/chat/completions", "reasoning_effort", json!("low"), json!("none")),
        (
            "/v1/messages",
            "thinking",
            json!({"type": "enabled", "budget_tokens": 1024}),
            json!({"type": "disabled"}),
        ),
    ];
    for (path, field, on, off) in cases {
        let unset = tokens(&door, path, field, Value::Null);
        let (on, off) = (tokens(&door, path, field, on), tokens(&door, path, field, off));
        assert_eq!((on, off), (unset + 1, unset + 2), "{path}");
    }
}

#[test]
fn templates_without_it_and_wrong_values_are_refused_by_name() {
    let door = door();
    let enabled = |budget: u32| json!({"type": "enabled", "budget_tokens": budget});
    let cases = [
        (CHATTY, "/v1/chat/completions", "reasoning_effort", json!("high"), "reasoning_effort"),
        (THINKER, "/v1/chat/completions", "reasoning_effort", json!("much"), "reasoning_effort"),
        (CHATTY, "/v1/messages", "thinking", enabled(1024), "thinking"),
        (THINKER, "/v1/messages", "thinking", enabled(1023), "thinking.budget_tokens"),
        (THINKER, "/v1/messages", "thinking", json!({"type": "enabled"}), "thinking.budget_tokens"),
        (THINKER, "/v1/messages", "thinking", json!({"type": "adaptive"}), "thinking.type"),
    ];
    for (model, path, field, value, place) in cases {
        let mut body =
            json!({"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "ab"}]});
        body[field] = value;
        let response = door.post(path, &body);
        let error = response.json();
        assert_eq!(response.status, 400, "{error}");
        assert!(error["error"]["message"].as_str().unwrap().starts_with(&format!("{place}: ")), "{error}");
    }
    let body = json!({"model": CHATTY, "max_tokens": 1, "messages": [{"role": "user", "content": "ab"}],
        "reasoning_effort": "none"});
    assert_eq!(door.post("/v1/chat/completions", &body).status, 200);
}
