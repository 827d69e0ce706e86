//! The Python package of `python/` before a real daemon: its answers are those that the Rust client gets.

use std::path::{Path, PathBuf};
use std::process::Command;

use rocmforge_client::Client;
use rocmforge_client::wire::{
    ChatMessage, EmbeddingOptions, GenerateRequest, Pooling, Prompt, TokenizeRequest,
};
use serde_json::{Value, json};

use crate::common;
use crate::forge::{Value as Meta, rankers, tiny_llama};
use crate::packages;
use crate::rig::{Rig, TINY, answer};

const CHATTY: &str = "chatty";
const ENDLESS: &str = "endless";
const RANKER: &str = "bert-ranker";
const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:";
const PROMPT: &str = "ab";
const TOKENS: u32 = 24;
const DOCUMENTS: [&str; 2] = ["the cat sat on the mat", "ba"];

/// The checker of types, and what builds the package.
const PACKAGES: [&str; 2] = ["mypy==2.4.1", "setuptools==84.2.1"];

fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("python")
}

fn rig() -> Rig {
    let mut rig = Rig::idle();
    for (name, context) in [(CHATTY, 2048), (ENDLESS, 32768)] {
        let model = tiny_llama(3)
            .set("llama.context_length", Meta::u32(context))
            .set("tokenizer.chat_template", Meta::string(TEMPLATE));
        std::fs::write(rig.model(name), model.build().bytes).unwrap();
    }
    let (_, ranker) = rankers().into_iter().find(|(name, _)| *name == RANKER).unwrap();
    std::fs::write(rig.model(RANKER), ranker.build().bytes).unwrap();
    rig.configure("[device]\nbackend = 'cpu'\n");
    rig.run();
    rig
}

/// Answers that this client gets to the requests of `test_daemon.py`.
fn expected(rig: &Rig, client: &Client) -> Value {
    let text = || Prompt::Text(PROMPT.into());
    let messages = vec![ChatMessage { role: "user".into(), content: PROMPT.into() }];
    let greedy =
        |model, prompt| GenerateRequest { max_tokens: TOKENS, ..GenerateRequest::new(model, prompt) };
    let chat = answer(client, &greedy(CHATTY, Prompt::Chat(messages))).unwrap();
    let story = answer(client, &GenerateRequest { ignore_eog: true, ..greedy(TINY, text()) }).unwrap();
    let tokens = TokenizeRequest {
        model: TINY.into(),
        text: PROMPT.into(),
        add_special: true,
        parse_special: false,
        ext: vec![],
    };
    let mut scores = client.generate(&greedy(TINY, text()).with_scores(0)).unwrap();
    let mut logprobs = Vec::new();
    while let Some(item) = scores.next_item().unwrap() {
        let of_the_prompt = item.ids.is_empty();
        logprobs.extend(item.logprobs.iter().filter(|_| of_the_prompt).map(|one| one.logprob));
    }
    let embed = |options| client.embed(&greedy(TINY, text()).with_embedding(options)).unwrap().values;
    let rank = |document: &str| {
        client.rank(&GenerateRequest::new(RANKER, text()).with_document(document)).unwrap().value
    };
    // As f64, so that Python reads the same numbers.
    let numbers = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<f64>>();
    json!({
        "chatty": CHATTY, "endless": ENDLESS, "tiny": TINY, "prompt": PROMPT, "tokens": TOKENS,
        "ranker": RANKER, "documents": DOCUMENTS, "relevances": numbers(DOCUMENTS.map(rank).to_vec()),
        "tiny_path": rig.model(TINY), "pid": rig.pid(),
        "chat": {"text": chat.text, "ids": chat.ids, "prompt_ids": chat.prompt_ids},
        "story": story.text,
        "token_ids": client.tokenize(&tokens).unwrap().ids,
        "logprobs": numbers(logprobs),
        "embedding": numbers(embed(EmbeddingOptions::default())),
        "raw_embedding": numbers(embed(EmbeddingOptions { pooling: Some(Pooling::Mean), normalise: false })),
    })
}

/// Runs the package's tests of a daemon with this interpreter; `path` is where it looks for packages first.
fn run(python: &Path, path: Option<&Path>) {
    let rig = rig();
    let kept = rig.dir.path().join("expected.json");
    std::fs::write(&kept, expected(&rig, &rig.client()).to_string()).unwrap();
    let mut command = Command::new(python);
    command.args(["-X", "dev", "-B", "-m", "unittest", "--verbose", "test_daemon"]);
    command.current_dir(package().join("tests"));
    command.env("ROCMFORGE_SOCKET", rig.socket()).env("ROCMFORGE_EXPECTED", kept).env_remove("PYTHONPATH");
    if let Some(path) = path {
        command.env("PYTHONPATH", path);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    rig.assert_idle();
}

#[test]
fn the_python_package_is_answered_as_the_rust_client_is() {
    // 3.11 is the oldest version that the package runs on.
    let new_enough = "import sys; sys.exit(sys.version_info < (3, 11))";
    if !packages::works(Command::new("python3").args(["-c", new_enough])) {
        common::skip("there is no python3 of version 3.11 or later");
        return;
    }
    run(Path::new("python3"), Some(&package()));
}

#[test]
fn the_python_package_is_installed_by_pip_and_its_types_hold() {
    let Some(python) = packages::python("python-package", &PACKAGES) else { return };
    // pip builds beside the sources, which stay as they are.
    let copy = tempfile::tempdir().unwrap();
    let to = copy.path().join("python");
    assert!(packages::works(Command::new("cp").arg("-r").arg(package()).arg(&to)));
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation"];
    let output = Command::new(&python).args(install).args(["--force-reinstall"]).arg(&to).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut types = Command::new(&python);
    types
        .args(["-m", "mypy", "--strict", "--no-error-summary", "--cache-dir"])
        .arg(copy.path().join("types"));
    let output = types.args(["rocmforge", "tests", "write_messages.py"]).current_dir(&to).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    run(&python, None);
}
