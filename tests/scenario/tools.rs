//! Chats with tools: what templates see of them, and what clients see of the answer's marks.

use rocmforge_client::calls::{Form, Tool};
use rocmforge_client::wire::{ChatMessage, ErrorCode, GenerateRequest, Penalties, Prompt, TokenizeRequest};
use serde_json::json;

use crate::forge::{Value, tiny_llama};
use crate::rig::{Rig, TINY, answer, code, collect};

const TEMPLATE: &str = "{{ tools|tojson }}{% for m in messages %}{{ m.role }}:{{ m.content is none }}{{ m.tool_calls|tojson if m.tool_calls }}\
    {{ m.tool_call_id }};{% endfor %}{{ flag }}{% if open %}<think>\n{% endif %}";

/// The vocabulary of [`tiny_llama`], whose last token is a mark instead, as a control token.
fn with_mark(template: &str) -> Vec<u8> {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).into();
    tokens.extend((0..=255).map(|byte: u8| format!("<0x{byte:02X}>")));
    tokens.extend(["\u{2581}", "a", "b", "<think>"].map(str::to_owned));
    let types: Vec<i32> = [2, 3, 3].into_iter().chain([6; 256]).chain([1, 1, 1, 3]).collect();
    let forge = tiny_llama(3)
        .set("llama.context_length", Value::u32(2048))
        .set("tokenizer.ggml.tokens", Value::strings(&tokens))
        .set("tokenizer.ggml.token_type", Value::i32s(&types))
        .set("tokenizer.chat_template", Value::string(template));
    forge.build().bytes
}

const MARK: u32 = 262;

fn chat(texts: &[(&str, &str)]) -> GenerateRequest {
    let message =
        |(role, content): &(&str, &str)| ChatMessage { role: (*role).into(), content: (*content).into() };
    let messages = texts.iter().map(message).collect();
    GenerateRequest { max_tokens: 2, ..GenerateRequest::new("tools", Prompt::Chat(messages)) }
}

#[test]
fn a_template_sees_tools_and_fields_of_messages() {
    let mut rig = Rig::start();
    std::fs::write(rig.model("tools"), with_mark(TEMPLATE)).unwrap();
    let client = rig.client();
    assert_eq!(client.show("tools", false).unwrap().calls(), Some(Form::Described.name()));
    assert_eq!(client.show(TINY, false).unwrap().calls(), None, "it has no template");
    let tool = Tool { name: "f".into(), description: None, parameters: json!({"z": 1, "a": 2.5}) };
    let extras = json!({
        "tools": [tool.for_template()],
        "messages": [null, {"content": null, "tool_calls": [{"id": "1"}]}, {"tool_call_id": "1"}],
        "variables": {"flag": true},
    });
    let request = chat(&[("user", "a"), ("assistant", ""), ("tool", "b")]);
    let given = answer(&client, &request.clone().with_chat_extras(&extras.to_string())).unwrap();
    let text = r#"[{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2.5}}}]user:False;assistant:True[{"id": "1"}];tool:False1;True"#;
    let expected = client.tokenize(&TokenizeRequest {
        model: "tools".into(),
        text: text.into(),
        add_special: true,
        parse_special: true,
        ext: vec![],
    });
    assert_eq!(given.prompt_ids, expected.unwrap().ids);

    let fails = |request: &GenerateRequest| {
        code(client.generate(request).and_then(|mut run| collect(&mut run)).map(drop))
    };
    let of_extras = |extras: &str| fails(&request.clone().with_chat_extras(extras));
    assert_eq!(of_extras(r#"{"messages": [null]}"#), ErrorCode::InvalidArgument as u16, "of another chat");
    assert_eq!(of_extras("[]"), ErrorCode::InvalidArgument as u16);
    let many = json!({"tools": vec![json!({}); 129]}).to_string();
    assert_eq!(of_extras(&many), ErrorCode::LimitExceeded as u16);
    let in_session = request.clone().with_chat_extras("{}").with_session("s");
    assert_eq!(fails(&in_session), ErrorCode::InvalidArgument as u16);
    let text = GenerateRequest::new("tools", Prompt::Text("a".into())).with_chat_extras("{}");
    assert_eq!(fails(&text), ErrorCode::InvalidArgument as u16);
    rig.assert_serves();
}

#[test]
fn marks_are_text_for_those_who_ask_and_an_open_reasoning_is_told() {
    let rig = Rig::start();
    std::fs::write(rig.model("tools"), with_mark(TEMPLATE)).unwrap();
    let client = rig.client();
    let only = Penalties { bias: vec![(MARK, 1000.0)], ..Penalties::default() };
    let request = chat(&[("user", "a")]).with_penalties(&only);
    let of = |request: &GenerateRequest| answer(&client, request).unwrap();
    let (plain, marked) = (of(&request), of(&request.clone().with_marks()));
    assert_eq!((&plain.ids, plain.text.as_str()), (&vec![MARK; 2], ""));
    assert_eq!((&marked.ids, marked.text.as_str()), (&vec![MARK; 2], "<think><think>"));
    for (extras, open) in [(r#"{"variables": {"open": true}}"#, true), ("{}", false)] {
        let mut run = client.generate(&request.clone().with_chat_extras(extras)).unwrap();
        let told: Vec<bool> = (&mut run).map(|item| item.unwrap().begins_in_reasoning()).collect();
        assert_eq!(told, [open, false], "{extras}");
    }
}
