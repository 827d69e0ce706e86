//! Chat templates of well-known models, compared with Jinja's output.

use std::path::PathBuf;

use rocmforge::model::gguf::Gguf;
use rocmforge::model::template::{Message, Renderer, TemplateError, TemplateRequest};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::common;

fn renderer() -> Renderer {
    Renderer::new(env!("CARGO_BIN_EXE_rocmforged"))
}

/// The source of a template of `expected/chat-prompts.json`; `None` after reporting that its model is missing.
fn source(name: &str) -> Option<String> {
    if name == "smollm2" {
        let file = std::fs::File::open(common::smollm2()?).unwrap();
        let (gguf, _file) = Gguf::open(file).unwrap();
        return Some(gguf.string("tokenizer.chat_template").unwrap().to_owned());
    }
    let path: PathBuf = common::cached(&format!("chat-templates/{name}.jinja"))?;
    Some(std::fs::read_to_string(path).unwrap())
}

fn request(kept: &Value, template: String, case: &Value) -> TemplateRequest {
    let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let map = |value: &Value| value.as_object().cloned().unwrap_or_default();
    let text = |key: &str| kept[key].as_str().map(str::to_owned);
    TemplateRequest {
        tools: list(&case["tools"]),
        add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap_or(true),
        bos_token: text("bos_token"),
        eos_token: text("eos_token"),
        variables: map(&case["variables"]),
        now_unix_s: kept["now_unix_s"].as_i64().unwrap(),
        ..TemplateRequest::new(template, messages)
    }
}

#[test]
fn templates_render_as_jinja_renders_them() {
    let kept: Value = serde_json::from_str(include_str!("expected/chat-prompts.json")).unwrap();
    let cases = kept["cases"].as_array().unwrap();
    let templates = kept["templates"].as_object().unwrap();
    assert!(templates.len() >= 14 && cases.len() >= 10);
    let (renderer, mut wrong) = (renderer(), Vec::new());
    for (name, entry) in templates {
        let Some(source) = source(name) else { continue };
        let sha256: String = Sha256::digest(&source).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(entry["sha256"], sha256, "{name}");
        for (case, expected) in cases.iter().zip(entry["prompts"].as_array().unwrap()) {
            let rendered = renderer.render(&request(&kept, source.clone(), case));
            let same = match (&rendered, &expected["text"], &expected["refused"]) {
                (Ok(text), expected, _) => expected == text,
                (Err(TemplateError::Refused { message }), _, expected) => expected == message,
                (Err(TemplateError::Failed { .. }), _, _) => expected["failed"].is_string(),
                _ => false,
            };
            if !same {
                wrong.push(format!(
                    "{name}, {}:\n  expected {expected}\n  rendered {rendered:?}",
                    case["name"]
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{} prompts differ:\n{}", wrong.len(), wrong.join("\n"));
}
