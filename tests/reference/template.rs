//! Chat templates of well-known models, compared with Jinja's output.

use std::path::PathBuf;

use rocmforge::model::gguf::Gguf;
use rocmforge::model::template::{Message, Renderer, TemplateError, TemplateRequest};
use rocmforge::session::Extras;
use rocmforge_client::calls::{self, Call, Form, Parser, Part, Tool, conversation, parts};
use serde_json::{Value, json};
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

/// Forms of calls, as the models' cards show them.
const FORMS: [(&str, Form); 14] = [
    ("GLM-4.6", Form::GlmTags),
    ("HuggingFaceTB-SmolLM3-3B", Form::Generic),
    ("Qwen-QwQ-32B", Form::Hermes),
    ("Qwen-Qwen2.5-7B-Instruct", Form::Hermes),
    ("Qwen-Qwen3-0.6B", Form::Hermes),
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", Form::Generic),
    ("google-gemma-2-2b-it", Form::Generic),
    ("ibm-granite-granite-3.3-2B-Instruct", Form::Described),
    ("meta-llama-Llama-3.1-8B-Instruct", Form::Llama),
    ("meta-llama-Llama-3.2-3B-Instruct", Form::Llama),
    ("microsoft-Phi-3.5-mini-instruct", Form::Generic),
    ("mistralai-Mistral-Nemo-Instruct-2407", Form::Mistral),
    ("openai-gpt-oss-120b", Form::Harmony),
    ("smollm2", Form::Generic),
];

/// Templates that write no calls into a chat.
const SILENT: [&str; 1] = ["ibm-granite-granite-3.3-2B-Instruct"];

/// Marks after an answer in a chat.
const ENDS: [&str; 6] =
    ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<|end_of_text|>", "<|observation|>"];

/// A template writes the calls of earlier answers as the model was trained to write them.
#[test]
fn calls_are_read_as_the_templates_of_well_known_models_write_them() {
    let arguments = json!({"city": "Oslo \"<é>\"", "days": 3});
    let tool = Tool {
        name: "get_weather".into(),
        description: Some("Tells the weather.".into()),
        parameters: json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
    };
    let call =
        Call { name: tool.name.clone(), arguments: arguments.to_string(), id: Some("abcdefghi".into()) };
    let said = |role: &str, content: Option<&str>, calls: Vec<Call>| calls::Message {
        role: role.into(),
        content: content.map(str::to_owned),
        calls,
        ..calls::Message::default()
    };
    let (renderer, mut wrong, mut read) = (renderer(), Vec::new(), 0);
    for (name, form) in FORMS {
        let Some(source) = source(name) else { continue };
        assert_eq!(Form::of_template(&source), form, "{name}");
        if form == Form::Generic || SILENT.contains(&name) {
            continue;
        }
        let render = |answer: bool| {
            let mut messages = vec![said("user", Some("What is the weather?"), vec![])];
            messages.extend(answer.then(|| said("assistant", None, vec![call.clone()])));
            let chat = conversation(form, std::slice::from_ref(&tool), messages, serde_json::Map::new());
            let messages: Vec<Message> = chat
                .messages
                .into_iter()
                .map(|message| Message::new(message.role, message.content))
                .collect();
            let extras = Extras::read(&chat.extras.unwrap(), messages.len()).unwrap();
            let mut request = TemplateRequest::new(source.clone(), messages);
            (request.bos_token, request.eos_token) = (Some("<s>".into()), Some("</s>".into()));
            extras.fill(&mut request);
            request.add_generation_prompt = !answer;
            renderer.render(&request).unwrap_or_else(|error| panic!("{name}: {error}"))
        };
        let (prompt, whole) = (render(false), render(true));
        // Earlier answers have no reasoning, which some prompts begin.
        let reasoning = prompt.rfind("<think>").filter(|at| Some(*at) > prompt.rfind("assistant"));
        let prompt = &prompt[..reasoning.unwrap_or(prompt.len())];
        let common = prompt.char_indices().zip(whole.chars()).find(|((_, a), b)| a != b);
        let answer = &whole[common.map_or(prompt.len(), |((at, _), _)| at).min(whole.len())..];
        let answer = ENDS.iter().fold(answer, |text, end| text.split(end).next().unwrap_or_default());
        let (mut parser, mut events) = (Parser::new(form, vec![tool.clone()]), vec![]);
        parser.push(answer, &mut events);
        parser.finish(&mut events);
        let found = parts(&events).into_iter().find_map(|part| match part {
            Part::Call(call) => Some((call.name, serde_json::from_str(&call.arguments).unwrap())),
            _ => None,
        });
        read += 1;
        if found != Some(("get_weather".to_owned(), arguments.clone())) {
            wrong.push(format!("{name}: {answer:?} gave {events:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {read} calls are not read:\n{}", wrong.len(), wrong.join("\n"));
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
