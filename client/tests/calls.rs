//! Answers with calls, each with its events, in a file that the Python client is tested with too.

#![allow(clippy::unwrap_used)] // tests fail by panicking

use rocmforge_client::calls::{Form, Parser, Part, Tool, parts};
use serde_json::{Value, json};

const ANSWERS: &str = include_str!("../../tests/golden/calls/answers.json");

/// The parts of an answer, as the file has them.
fn events(form: Form, tools: &[Tool], answer: &str) -> Vec<Value> {
    let (mut parser, mut events) = (Parser::new(form, tools.to_vec()), Vec::new());
    parser.push(answer, &mut events);
    parser.finish(&mut events);
    let content = |part| match part {
        Part::Text(text) => json!({ "text": text }),
        Part::Reasoning(text) => json!({ "reasoning": text }),
        Part::Call(call) => {
            let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
            json!({"call": {"name": call.name, "arguments": arguments, "id": call.id}})
        }
        Part::Cut(call) => json!({"cut": call.name}),
    };
    parts(&events).into_iter().map(content).collect()
}

#[test]
fn the_kept_answers_have_their_events() {
    let kept: Value = serde_json::from_str(ANSWERS).unwrap();
    let tool = |tool: &Value| Tool {
        name: tool["name"].as_str().unwrap().to_owned(),
        description: None,
        parameters: tool["parameters"].clone(),
    };
    let tools: Vec<Tool> = kept["tools"].as_array().unwrap().iter().map(tool).collect();
    let differing: Vec<String> = kept["answers"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|one| {
            let form = one["form"].as_str().unwrap();
            let found = json!(events(Form::of_name(form), &tools, one["answer"].as_str().unwrap()));
            (found != one["events"]).then(|| format!("{one}\n  has {found}"))
        })
        .collect();
    assert!(differing.is_empty(), "{}", differing.join("\n"));
    assert!(Form::ALL.iter().all(|form| ANSWERS.contains(form.name())));
}
