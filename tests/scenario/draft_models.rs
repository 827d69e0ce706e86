//! Draft models of the configuration, through the socket. Answers are those without, and a draft model that is wrong or missing costs
//! a request no more than its drafts.

use std::fs;

use rocmforge_client::Connection;
use rocmforge_client::wire::{AnswerForm, FormKind, GenerateEnd, GenerateRequest, Prompt, SamplingOptions};

use crate::rig::{Answer, Rig, TINY, collect};

/// The name of the draft model.
const DRAFT: &str = "draft";

fn requests() -> Vec<GenerateRequest> {
    let ask = |seed: u64| {
        let temperature = if seed.is_multiple_of(2) { 0.0 } else { 0.7 };
        let sampling = SamplingOptions { temperature, seed: Some(seed), ..SamplingOptions::default() };
        let prompt = Prompt::Text("Lily and Tom went to the park. One day".into());
        GenerateRequest { max_tokens: 70, sampling, ..GenerateRequest::new(TINY, prompt) }
    };
    let mut all: Vec<_> = (0..6).map(ask).collect();
    all.push(ask(7).with_form(&AnswerForm::new(FormKind::Regex, "(ab|cd){20}")));
    all.push(ask(8).with_context_shift(4));
    all
}

fn ask(connection: &Connection, request: &GenerateRequest) -> (Answer, GenerateEnd) {
    let mut generation = connection.generate(request).unwrap();
    let answer = collect(&mut generation).unwrap();
    (answer, generation.end().cloned().unwrap())
}

/// Tokens that were drafted for all of these requests, and those that were right. Checks that the answers are these.
fn drafted(rig: &Rig, alone: &[(GenerateRequest, Answer)]) -> (u64, u64) {
    let connection = Connection::connect(&rig.options()).unwrap();
    let (mut drafted, mut accepted) = (0, 0);
    for (request, answer) in alone {
        let (with, end) = ask(&connection, request);
        assert_eq!(&with, answer, "{request:?}");
        drafted += end.drafted_tokens();
        accepted += end.accepted_tokens();
    }
    (drafted, accepted)
}

/// A copy of the model with other weights in its last part. It is as slow, so it drafts until that was measured.
fn another(rig: &Rig) {
    let path = rig.model(DRAFT);
    let mut bytes = fs::read(rig.model(TINY)).unwrap();
    let at = bytes.len() - 20_000;
    let weights = (0..4000u32).flat_map(|n| ((n as f32).sin() * 0.3).to_le_bytes());
    bytes[at..at + 16_000].copy_from_slice(&weights.collect::<Vec<_>>());
    fs::write(path, bytes).unwrap();
}

fn configuration(rig: &Rig, draft: &str) -> String {
    let config = fs::read_to_string(rig.config()).unwrap();
    let before = config.split("[weights.models]").next().unwrap().to_owned();
    format!("{before}[weights.models]\n{TINY:?} = {{ {draft} }}\n")
}

#[test]
fn answers_with_a_draft_model_are_those_without() {
    let mut rig = Rig::start();
    let connection = Connection::connect(&rig.options()).unwrap();
    let alone: Vec<_> =
        requests().into_iter().map(|request| (request.clone(), ask(&connection, &request).0)).collect();
    assert_eq!(drafted(&rig, &alone), (0, 0), "nobody named a draft model");

    another(&rig);
    rig.reload(&configuration(&rig, &format!("draft = {DRAFT:?}")));
    let (with, accepted) = drafted(&rig, &alone);
    assert!(with > 0 && accepted <= with, "{accepted} of {with}");
    // All at once: some find no place for drafts.
    let mut together: Vec<_> =
        alone.iter().map(|(request, _)| connection.generate(request).unwrap()).collect();
    for ((_, answer), beside) in alone.iter().zip(&mut together) {
        assert_eq!(&collect(beside).unwrap(), answer);
    }
    // A number that the request names bounds the draft.
    let (request, answer) = &alone[0];
    let (one, end) = ask(&connection, &request.clone().with_drafts(1));
    assert_eq!(&one, answer);
    assert!(end.drafted_tokens() < 70, "{}", end.drafted_tokens());

    // Another file takes its place.
    fs::remove_file(rig.model(DRAFT)).unwrap();
    another(&rig);
    assert!(drafted(&rig, &alone).0 > 0);
    fs::remove_file(rig.model(DRAFT)).unwrap();
    rig.reload(&configuration(&rig, &format!("draft = {DRAFT:?}")));
    let of_forms = |counts: (u64, u64)| counts.0 < 40; // those of its own text alone
    assert!(of_forms(drafted(&rig, &alone)));
    rig.reload(&configuration(&rig, ""));
    assert_eq!(drafted(&rig, &alone), (0, 0));
    rig.assert_serves();
    rig.assert_idle();
}

#[test]
fn a_draft_model_that_cannot_draft_is_named_in_the_log() {
    let rig = Rig::start();
    let connection = Connection::connect(&rig.options()).unwrap();
    let request = requests().remove(0);
    let alone = ask(&connection, &request).0;
    for (draft, why) in [(TINY, "it is the model itself"), ("nobody", "no model is named")] {
        rig.reload(&configuration(&rig, &format!("draft = {draft:?}")));
        let says = format!("weights.models: {draft} cannot draft for {TINY}: ");
        let told = || rig.log_text().lines().find(|line| line.contains(&says)).map(str::to_owned);
        rig.eventually("the reason is in the log", |_| told().is_some());
        assert!(told().unwrap().contains(why), "{:?}", told());
        let (answer, end) = ask(&connection, &request);
        assert_eq!((answer, end.drafted_tokens()), (alone.clone(), 0));
    }
}
