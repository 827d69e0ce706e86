//! A real model at temperature 1 answers by JSON schemas, and another implementation checks its answers.
//!
//! `ROCMFORGE_LONG=1` asks by all schemas with three seeds each, otherwise by some of them with one.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use rocmforge_client::Connection;
use rocmforge_client::wire::{
    AnswerForm, ChatMessage, FormKind, GenerateRequest, Prompt, SamplingOptions, StopReason,
};
use serde_json::Value;

use crate::common;
use crate::packages;
use crate::rig::{Rig, collect};

/// The package that checks answers, and one that it needs for times.
pub const PACKAGES: [&str; 2] = ["jsonschema==4.26.0", "rfc3339-validator==0.1.4"];

/// Most tokens of an answer. Those that are not complete by then are left out, but few may be.
const TOKENS_MAX: u32 = 300;

/// The number of answers that the package found right.
pub fn checked(python: &Path, answers: &[(Value, String)]) -> usize {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/scenario/schemas.py");
    let mut command = Command::new(python);
    command.arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(&serde_json::to_vec(answers).unwrap()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().parse().unwrap()
}

#[test]
fn complete_answers_of_a_real_model_are_valid_by_their_schemas() {
    let (Some(smollm2), Some(python)) = (common::smollm2(), packages::python("schemas", &PACKAGES)) else {
        return;
    };
    let all: Vec<Value> = serde_json::from_str(include_str!("schemas.json")).unwrap();
    let long = std::env::var_os("ROCMFORGE_LONG").is_some_and(|value| value == "1");
    let (step, seeds) = if long { (1, 3) } else { (6, 1) };
    let mut rig = Rig::idle();
    std::os::unix::fs::symlink(smollm2, rig.model("smollm2")).unwrap();
    rig.configure("[device]\nbackend = 'cpu'\n");
    rig.run();
    let ask = |schema: &Value, seed| {
        let content = format!("Invent an example in JSON for this schema: {schema}");
        let message = ChatMessage { role: "user".into(), content };
        let sampling = SamplingOptions { temperature: 1.0, seed: Some(seed), ..SamplingOptions::default() };
        let request = GenerateRequest::new("smollm2", Prompt::Chat(vec![message]));
        GenerateRequest { max_tokens: TOKENS_MAX, sampling, ..request }
            .with_form(&AnswerForm::new(FormKind::JsonSchema, &schema.to_string()))
    };
    let asked: Vec<(&Value, GenerateRequest)> = (0..seeds)
        .flat_map(|seed| all.iter().step_by(step).map(move |schema| (schema, seed)))
        .map(|(schema, seed)| (schema, ask(schema, seed)))
        .collect();
    let connection = Connection::connect(&rig.options()).unwrap();
    let (mut complete, mut cut) = (Vec::new(), 0);
    for some in asked.chunks(8) {
        let begun: Vec<_> = some.iter().map(|(_, request)| connection.generate(request).unwrap()).collect();
        for ((schema, _), mut generation) in some.iter().zip(begun) {
            let answer = collect(&mut generation).unwrap();
            match generation.end().unwrap().stop_reason {
                StopReason::EndOfGeneration => complete.push(((*schema).clone(), answer.text)),
                _ => {
                    println!("not complete: {schema}: {}", answer.text);
                    cut += 1;
                }
            }
        }
    }
    // Numbers and lists without an end are a matter of chance.
    assert!(cut * 4 <= asked.len(), "{cut} of {} answers were not complete", asked.len());
    assert_eq!(checked(&python, &complete), asked.len() - cut);
    println!("{} answers are valid, {cut} were not complete within {TOKENS_MAX} tokens", complete.len());
}
