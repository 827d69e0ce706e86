//! Models under other names.

use rocmforge_gateway::{Alias, Settings};
use serde_json::{Value, json};

use crate::door::{CHATTY, Door};
use crate::rig::TINY;

/// A gateway with these aliases.
fn door(aliases: &[String]) -> Door {
    let aliases = aliases.iter().map(|alias| alias.parse::<Alias>().unwrap()).collect();
    Door::open_with("127.0.0.1:0", None, Settings { aliases, ..Settings::default() })
}

fn text(door: &Door, model: Value) -> Value {
    let body = json!({"model": model, "prompt": "ab", "max_tokens": 8, "temperature": 0});
    door.post("/v1/completions", &body).json()["choices"][0]["text"].clone()
}

#[test]
fn an_alias_is_its_model_in_all_apis_and_lists() {
    let door = door(&[format!("gpt-4o={CHATTY}"), format!("claude={CHATTY}"), "lost=nobody".to_owned()]);
    assert_eq!(text(&door, json!("gpt-4o")), text(&door, json!(CHATTY)));
    let messages = json!([{"role": "user", "content": "ab"}]);
    let asked = json!({"model": "claude", "max_tokens": 4, "messages": messages});
    assert_eq!(door.post("/v1/messages", &asked).status, 200);
    let asked = json!({"model": "gpt-4o:latest", "stream": false, "messages": messages, "options": {"num_predict": 4}});
    assert_eq!(door.post("/api/chat", &asked).status, 200);
    let list = door.get("/v1/models").json();
    let names: Vec<&str> =
        list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert!(["gpt-4o", "claude", CHATTY, TINY].iter().all(|name| names.contains(name)), "{names:?}");
    assert!(!names.contains(&"lost"), "{names:?}");
    assert_eq!(door.get("/v1/models/gpt-4o").status, 200);
    for unknown in ["lost", "other"] {
        assert_eq!(door.post("/v1/completions", &json!({"model": unknown, "prompt": "a"})).status, 404);
    }
    assert_eq!(door.post("/v1/completions", &json!({"prompt": "a"})).status, 400);
}

#[test]
fn a_star_is_for_all_names_that_no_model_has() {
    let door = door(&[format!("*={TINY}"), format!("gpt-4o={CHATTY}")]);
    let (tiny, chatty) = (text(&door, json!(TINY)), text(&door, json!(CHATTY)));
    assert_ne!(tiny, chatty);
    for model in [json!("strange"), json!(null), json!("strange:latest")] {
        assert_eq!(text(&door, model.clone()), tiny, "{model}");
    }
    for model in ["gpt-4o", CHATTY] {
        assert_eq!(text(&door, json!(model)), chatty, "{model}");
    }
    // Older clients of Ollama name it in another field.
    let shown = |body: Value| door.post("/api/show", &body).json();
    for name in ["gpt-4o", CHATTY] {
        assert_eq!(shown(json!({ "name": name })), shown(json!({"model": CHATTY})), "{name}");
    }
    assert_eq!(shown(json!({"name": "strange", "model": ""})), shown(json!({"model": TINY})));
    let body = json!({"model": 7, "prompt": "a"});
    assert_eq!(door.post("/v1/completions", &body).status, 400);
}
