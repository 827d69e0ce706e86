//! A real model at temperature 1 answers by published JSON schemas, and another implementation checks its answers.
//!
//! The schemas are those of JSON-Schema-Test-Suite that have a valid case, and parameters of functions of the Berkeley
//! Function-Calling Leaderboard (BFCL).
//!
//! `ROCMFORGE_LONG=1` fetches the packages that have them and asks with three seeds.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use rocmforge_client::wire::{
    AnswerForm, ChatMessage, ErrorCode, FormKind, GenerateRequest, Prompt, SamplingOptions, StopReason,
};
use rocmforge_client::{ClientError, Connection};
use serde_json::Value;

use crate::common;
use crate::packages::{installed, python, works};
use crate::rig::{Answer, Rig, collect};
use crate::schemas::{PACKAGES, checked};

/// The source distribution has the suite; the wheel has the functions.
const SOURCES: [&str; 2] = ["jsonschema==4.26.0", "bfcl-eval==2026.3.23"];

/// Most tokens of an answer. Those that are not complete by then are left out, but few may be.
const TOKENS_MAX: u32 = 200;

const SEEDS: u64 = 3;

/// Requests that run at once.
const AT_ONCE: usize = 8;

/// Numbers of one source of schemas.
#[derive(Default)]
struct Row {
    refused: usize,
    accepted: usize,
    answers: usize,
    complete: Vec<(Value, String)>,
}

/// The packages' files; `None` after reporting that they cannot be fetched.
fn fetched(python: &Path) -> Option<[PathBuf; 2]> {
    let needs = "they need a package registry, and pip to read a source distribution";
    let directory = installed("published-schemas", &SOURCES, needs, |directory| {
        let download = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"];
        let mut command = Command::new(python);
        command.args(download).args(["--no-binary", "jsonschema", "--dest"]).arg(directory);
        works(command.args(SOURCES))
    })?;
    let with = |end: &str| {
        let mut found = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path());
        found.find(|path| path.to_string_lossy().ends_with(end)).expect(end)
    };
    Some([with(".tar.gz"), with(".whl")])
}

/// Tasks with a source, a name, a schema and a question.
fn tasks(python: &Path, files: &[PathBuf; 2]) -> Vec<Value> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/scenario/published.py");
    let output = Command::new(python).arg(script).args(files).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn request(task: &Value, seed: u64, max_tokens: u32) -> GenerateRequest {
    let content = task["question"].as_str().unwrap().to_owned();
    let message = ChatMessage { role: "user".into(), content };
    let sampling = SamplingOptions { temperature: 1.0, seed: Some(seed), ..SamplingOptions::default() };
    let request = GenerateRequest::new("smollm2", Prompt::Chat(vec![message]));
    GenerateRequest { max_tokens, sampling, ..request }
        .with_form(&AnswerForm::new(FormKind::JsonSchema, &task["schema"].to_string()))
}

/// Asks all, some at once, each on a connection that reads while others wait: a reader that stops for long is sent away.
/// Returns the answers in order, with their reasons to stop.
fn ask(rig: &Rig, asked: &[(&Value, GenerateRequest)]) -> Vec<Result<(Answer, StopReason), ClientError>> {
    let one = |request: &GenerateRequest, connection: &Connection| {
        let mut generation = connection.generate(request)?;
        let answer = collect(&mut generation)?;
        Ok::<_, ClientError>((
            answer,
            generation.end().expect("an answer without error has no end").stop_reason,
        ))
    };
    let some = |first: usize| -> Vec<Result<(Answer, StopReason), ClientError>> {
        let connection = Connection::connect(&rig.options()).unwrap();
        let mine = asked.iter().skip(first).step_by(AT_ONCE);
        mine.map(|(_, request)| one(request, &connection)).collect()
    };
    let some = &some;
    let mut answers: Vec<_> = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..AT_ONCE).map(|first| scope.spawn(move || some(first))).collect();
        readers.into_iter().map(|reader| reader.join().unwrap().into_iter()).collect()
    });
    (0..asked.len()).map(|at| answers[at % AT_ONCE].next().unwrap()).collect()
}

fn text<'a>(task: &'a Value, key: &str) -> &'a str {
    task[key].as_str().unwrap()
}

#[test]
fn published_schemas_are_answered_as_they_say_or_refused_by_name() {
    if !common::is_long() {
        return common::not_run("ROCMFORGE_LONG=1 fetches the packages and asks for minutes");
    }
    let (Some(smollm2), Some(python)) = (common::smollm2(), python("schemas", &PACKAGES)) else { return };
    let Some(files) = fetched(&python) else { return };
    let all = tasks(&python, &files);
    let mut rig = Rig::idle();
    std::os::unix::fs::symlink(smollm2, rig.model("smollm2")).unwrap();
    rig.configure("[device]\nbackend = 'cpu'\n");
    rig.run();
    let mut rows: BTreeMap<&str, Row> = BTreeMap::new();

    // One token tells whether the schema is taken.
    let tried: Vec<_> = all.iter().map(|task| (task, request(task, 0, 1))).collect();
    let mut taken: Vec<&Value> = Vec::new();
    for ((task, _), answer) in tried.iter().zip(ask(&rig, &tried)) {
        let row = rows.entry(text(task, "from")).or_default();
        match answer {
            Ok(_) => {
                row.accepted += 1;
                taken.push(task);
            }
            Err(ClientError::Server(error)) => {
                assert_eq!(error.code, ErrorCode::InvalidArgument as u16, "{error}");
                println!("refused: {}: {}", text(task, "name"), error.message);
                row.refused += 1;
            }
            Err(error) => panic!("{}: {error}", text(task, "name")),
        }
    }
    let asked: Vec<(&Value, GenerateRequest)> = (0..SEEDS)
        .flat_map(|seed| taken.iter().map(move |task| (*task, request(task, seed, TOKENS_MAX))))
        .collect();
    for ((task, _), answer) in asked.iter().zip(ask(&rig, &asked)) {
        let row = rows.get_mut(text(task, "from")).unwrap();
        let (answer, stop_reason) = answer.unwrap();
        row.answers += 1;
        match stop_reason {
            StopReason::EndOfGeneration => row.complete.push((task["schema"].clone(), answer.text)),
            _ => println!("not complete: {}", text(task, "name")),
        }
    }

    println!("{:24}  refused    taken  answers complete    valid", "schemas of");
    let mut faults = Vec::new();
    for (from, row) in &rows {
        let valid = checked(&python, &row.complete);
        let (answers, complete) = (row.answers, row.complete.len());
        let numbers = [row.refused, row.accepted, answers, complete, valid];
        println!("{from:24} {}", numbers.map(|number| format!("{number:8}")).join(" "));
        // Texts and lists without an end are a matter of chance: this small model does not end a quarter of its answers.
        if valid < complete || complete * 2 < answers {
            faults.push(format!(
                "{from}: of {answers} answers, {complete} were complete, and {valid} of them valid"
            ));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("; "));
    let (suite, functions) = (&rows["JSON-Schema-Test-Suite"], &rows["BFCL"]);
    assert!(suite.accepted >= 191, "{} schemas of the suite are taken; it were 191", suite.accepted);
    assert_eq!((functions.accepted, functions.refused), (100, 0), "parameters of functions were refused");
}
