//! Drafted tokens, through the socket: answers are those without, whatever else a request asks for.

use rocmforge_client::Connection;
use rocmforge_client::wire::{
    AnswerForm, FormKind, GenerateEnd, GenerateRequest, Penalties, Prompt, Samplers, SamplingOptions,
};

use crate::rig::{Answer, Rig, TINY, collect};

/// A request with a prompt that says something twice, and the beginning of it once more.
fn again(max_tokens: u32, seed: u64) -> GenerateRequest {
    let passage = "Lily and Tom went to the park. They saw a big dog. The dog ran to the ball. ";
    let prompt = Prompt::Text(format!("{passage}{passage}Lily and Tom"));
    let temperature = if seed.is_multiple_of(2) { 0.0 } else { 0.7 };
    let sampling =
        SamplingOptions { temperature, seed: Some(seed), top_logprobs: 2, ..SamplingOptions::default() };
    GenerateRequest { max_tokens, sampling, ..GenerateRequest::new(TINY, prompt) }
}

fn requests() -> Vec<GenerateRequest> {
    let schema = r#"{"type": "array", "minItems": 6, "maxItems": 6, "items": {"enum": ["blue", "green"]}}"#;
    let form = |kind, text| AnswerForm::new(kind, text);
    let penalties = Penalties { repeat: 1.05, ..Penalties::default() };
    let seeds = 0..4u64;
    seeds
        .flat_map(|seed| {
            let plain = again(90, seed);
            [
                GenerateRequest { ignore_eog: true, ..plain.clone() },
                GenerateRequest { stop: vec!["dog.".into(), "zzz".into()], ..plain.clone() },
                plain.clone().with_penalties(&penalties),
                plain.clone().with_form(&form(FormKind::JsonSchema, schema)),
                plain.clone().with_form(&form(FormKind::Regex, "(ab|cd){30}")),
                plain.clone().with_samplers(&Samplers { typical_p: 0.9, ..Samplers::default() }),
            ]
        })
        .collect()
}

fn ask(connection: &Connection, request: &GenerateRequest) -> (Answer, GenerateEnd) {
    let mut generation = connection.generate(request).unwrap();
    let answer = collect(&mut generation).unwrap();
    (answer, generation.end().cloned().unwrap())
}

/// The parts of an end that drafts do not change.
fn same(end: &GenerateEnd) -> (String, String, u32) {
    (format!("{:?}", end.stop_reason), end.text.clone(), end.usage.generated_tokens)
}

#[test]
fn answers_with_drafts_are_those_without() {
    let mut rig = Rig::start();
    let connection = Connection::connect(&rig.options()).unwrap();
    let requests = requests();
    let alone: Vec<_> = requests.iter().map(|request| ask(&connection, request)).collect();
    let (mut drafted, mut accepted, mut with_form) = (0, 0, 0);
    for (request, (answer, end)) in requests.iter().zip(&alone) {
        assert_eq!((end.drafted_tokens(), end.accepted_tokens()), (0, 0));
        let (with, with_end) = ask(&connection, &request.clone().with_drafts(8));
        assert_eq!((&with, same(&with_end)), (answer, same(end)), "{request:?}");
        drafted += with_end.drafted_tokens();
        accepted += with_end.accepted_tokens();
        with_form +=
            if request.form().is_ok_and(|form| form.is_some()) { with_end.accepted_tokens() } else { 0 };
    }
    // How many are offered depends on what rows were measured to take.
    assert!(drafted > accepted && accepted > 0 && with_form > 0, "{accepted} of {drafted}, {with_form}");
    let device = rig.client().status().unwrap().devices.remove(0);
    // The device also counts drafts of steps after which an answer was complete by its form.
    assert_eq!(device.accepted_tokens(), accepted);
    assert!((drafted..drafted + 200).contains(&device.drafted_tokens()), "{}", device.drafted_tokens());
    // All at once, some of them with drafts.
    let mut together: Vec<_> = (0..)
        .zip(&requests)
        .map(|(number, request)| request.clone().with_drafts([0, 3, 16][number % 3]))
        .map(|request| connection.generate(&request).unwrap())
        .collect();
    for ((answer, _), beside) in alone.iter().zip(&mut together) {
        assert_eq!(&collect(beside).unwrap(), answer);
    }
    rig.assert_serves();
    rig.assert_idle();
}

#[test]
fn mirostat_drafts_nothing_and_a_session_goes_on_after_drafts() {
    let rig = Rig::start();
    let connection = Connection::connect(&rig.options()).unwrap();
    let mirostat = again(60, 1).with_samplers(&Samplers { mirostat: true, ..Samplers::default() });
    let (answer, _) = ask(&connection, &mirostat);
    let (with, end) = ask(&connection, &mirostat.clone().with_drafts(8));
    assert_eq!((with, end.drafted_tokens()), (answer, 0));
    let more = |name: &str, drafts| {
        let first = ask(&connection, &again(60, 2).with_session(name).with_drafts(drafts));
        let second = GenerateRequest {
            prompt: Prompt::Text(" Then they".into()),
            ..again(40, 2).with_session(name).with_drafts(drafts)
        };
        let (second, end) = ask(&connection, &second);
        (first.0, second, end.session_tokens())
    };
    assert_eq!(more("with", 16), more("without", 0));
}
