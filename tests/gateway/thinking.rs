//! Reasoning is turned on and off by the APIs' own fields, in templates that know it.

use serde_json::{Value, json};

use crate::door::{CHATTY, Door};

const OPENAI: &str = "/v1/chat/completions";
const ANTHROPIC: &str = "/v1/messages";
const OLLAMA: &str = "/api/chat";
const OLLAMA_TEXT: &str = "/api/generate";

/// A model whose template writes one more `b` with reasoning, and two more without.
const THINKER: &str = "thinker";

const TEMPLATE: &str = "{% for m in messages %}{{ m.content }}{% endfor %}\
    {% if enable_thinking is defined %}{{ 'b' if enable_thinking else 'bb' }}{% endif %}";

/// A model whose template knows degrees: as many further `b` as the degree has letters.
const GRADED: &str = "graded";

const GRADES: &str = "{{ messages[0].content }}{{ 'b' * (reasoning_effort|default('medium'))|length }}";

/// A model whose answer is all reasoning, if there is any: it does not know how to end it.
const MUSER: &str = "muser";

const MUSES: &str = "{{ messages[0].content }}{% if thinking %}<think>{% endif %}";

/// It names a variable, and reads none.
const SAYS_NOTHING: &str = "{# enable_thinking #}{{ messages[0].content }}";

fn door() -> Door {
    Door::of_templates(&[(THINKER, TEMPLATE), (GRADED, GRADES), (MUSER, MUSES), (CHATTY, SAYS_NOTHING)])
}

/// A request for one token in the form of the path's API.
fn asked(model: &str, path: &str) -> Value {
    let messages = json!([{"role": "user", "content": "ab"}]);
    let options = json!({"num_predict": 1});
    match path {
        OLLAMA => json!({"model": model, "messages": messages, "stream": false, "options": options}),
        OLLAMA_TEXT => json!({"model": model, "prompt": "ab", "stream": false, "options": options}),
        _ => json!({"model": model, "messages": messages, "max_tokens": 1}),
    }
}

/// Tokens of a prompt with that field.
fn tokens(door: &Door, model: &str, path: &str, field: &str, value: Value) -> u64 {
    let mut body = asked(model, path);
    body[field] = value;
    let reply = door.post(path, &body).json();
    let places = ["/usage/prompt_tokens", "/usage/input_tokens", "/prompt_eval_count"];
    let count = |place: &str| reply.pointer(place)?.as_u64();
    let known = count("/usage/cache_read_input_tokens").unwrap_or(0);
    known + places.into_iter().find_map(count).unwrap_or_else(|| panic!("{reply}"))
}

#[test]
fn each_apis_field_sets_the_templates_variable() {
    let door = door();
    let cases = [
        (OPENAI, "reasoning_effort", json!("low"), json!("none")),
        (OLLAMA, "think", json!(true), json!(false)),
        (OLLAMA_TEXT, "think", json!(true), json!(false)),
        (
            ANTHROPIC,
            "thinking",
            json!({"type": "enabled", "budget_tokens": 1024}),
            json!({"type": "disabled"}),
        ),
    ];
    for (path, field, on, off) in cases {
        let of = |value| tokens(&door, THINKER, path, field, value);
        let (unset, on, off) = (of(Value::Null), of(on), of(off));
        assert_eq!((on, off), (unset + 1, unset + 2), "{path}");
    }
    let of = |value| tokens(&door, THINKER, ANTHROPIC, "thinking", value);
    assert_eq!(of(json!({"type": "adaptive"})), of(Value::Null), "the template decides");
    // Degrees, in a template that knows them: the default has 6 letters.
    let of = |path, field, value| tokens(&door, GRADED, path, field, value);
    for (path, field) in [(OPENAI, "reasoning_effort"), (OLLAMA, "think")] {
        let unset = of(path, field, Value::Null);
        for (degree, letters) in [("low", 3), ("medium", 6), ("high", 4)] {
            assert_eq!(of(path, field, json!(degree)), unset - 6 + letters, "{path}: {degree}");
        }
    }
    assert_eq!(of(OLLAMA, "think", json!(true)), of(OLLAMA, "think", Value::Null));
}

#[test]
fn ollamas_list_of_abilities_has_it() {
    let door = door();
    for (model, thinks) in [(THINKER, true), (GRADED, true), (CHATTY, false)] {
        let abilities = door.post("/api/show", &json!({"model": model})).json()["capabilities"].clone();
        let expected =
            if thinks { json!(["completion", "tools", "thinking"]) } else { json!(["completion", "tools"]) };
        assert_eq!(abilities, expected, "{model}");
    }
}

#[test]
fn templates_without_it_and_wrong_values_are_refused_by_name() {
    let door = door();
    let enabled = |budget: u32| json!({"type": "enabled", "budget_tokens": budget});
    let cases = [
        (CHATTY, OPENAI, "reasoning_effort", json!("high"), "reasoning_effort"),
        (GRADED, OPENAI, "reasoning_effort", json!("none"), "reasoning_effort"),
        (THINKER, OPENAI, "reasoning_effort", json!("much"), "reasoning_effort"),
        (CHATTY, OLLAMA, "think", json!(true), "think"),
        (CHATTY, OLLAMA_TEXT, "think", json!(true), "think"),
        (GRADED, OLLAMA, "think", json!(false), "think"),
        (THINKER, OLLAMA, "think", json!("much"), "think"),
        (CHATTY, ANTHROPIC, "thinking", enabled(1024), "thinking"),
        (THINKER, ANTHROPIC, "thinking", enabled(1023), "thinking.budget_tokens"),
        (THINKER, ANTHROPIC, "thinking", json!({"type": "enabled"}), "thinking.budget_tokens"),
        (THINKER, ANTHROPIC, "thinking", json!({"type": "much"}), "thinking.type"),
        (
            THINKER,
            ANTHROPIC,
            "thinking",
            json!({"type": "adaptive", "budget_tokens": 1024}),
            "thinking.budget_tokens",
        ),
    ];
    for (model, path, field, value, place) in cases {
        let mut body = asked(model, path);
        body[field] = value;
        let response = door.post(path, &body);
        let error = response.json();
        assert_eq!(response.status, 400, "{error}");
        // Ollama's errors are texts alone.
        let text = error["error"]["message"].as_str().or(error["error"].as_str()).unwrap();
        assert!(text.starts_with(&format!("{place}: ")), "{error}");
    }
    let body = json!({"model": CHATTY, "max_tokens": 1, "messages": [{"role": "user", "content": "ab"}],
        "reasoning_effort": "none"});
    assert_eq!(door.post(OPENAI, &body).status, 200);
}

#[test]
fn reasoning_is_apart_from_the_text_and_counted() {
    let door = door();
    for (on, effort) in [(true, "medium"), (false, "none")] {
        let told = if on { 6 } else { 0 };
        let body = json!({"model": MUSER, "input": "ab", "max_output_tokens": 6, "temperature": 0,
            "reasoning": {"effort": effort}});
        let whole = door.post("/v1/responses", &body).json();
        let item = &whole["output"][0];
        assert_eq!(item["type"], if on { "reasoning" } else { "message" }, "{whole}");
        assert_eq!(whole["usage"]["output_tokens_details"]["reasoning_tokens"], told, "{whole}");
        let text = item["content"][0]["text"].as_str().unwrap();
        let body = json!({"model": MUSER, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 6, "temperature": 0,
            "reasoning_effort": effort});
        let chat = door.post(OPENAI, &body).json();
        let field = if on { "reasoning_content" } else { "content" };
        assert_eq!(chat["choices"][0]["message"][field], text);
        assert_eq!(chat["usage"]["completion_tokens_details"]["reasoning_tokens"], told);
        let body = json!({"model": MUSER, "prompt": "ab", "stream": false, "think": on,
            "options": {"num_predict": 6, "temperature": 0}});
        let generated = door.post(OLLAMA_TEXT, &body).json();
        assert_eq!(generated[if on { "thinking" } else { "response" }], text, "{generated}");
        assert_eq!(generated["response"].as_str().unwrap().is_empty(), on);
    }
}
