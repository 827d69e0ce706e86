//! Answers of a given form, penalties and biases, through the socket.

use rocmforge_client::wire::{
    AnswerForm, Dry, EXT_GENERATE_FORM, EXT_GENERATE_PENALTIES, EXT_GENERATE_SAMPLERS, ErrorCode, FormKind,
    GenerateEnd, GenerateRequest, Penalties, Prompt, Samplers, SamplingOptions, StopReason, TokenizeRequest,
};
use rocmforge_client::{Client, Connection};
use serde_json::Value;

use crate::rig::{Answer, Rig, TINY, anonymous, answer, code, collect};

fn story(max_tokens: u32, seed: u64) -> GenerateRequest {
    let sampling = SamplingOptions { temperature: 1.0, seed: Some(seed), ..SamplingOptions::default() };
    let prompt = Prompt::Text("Once upon a time".to_owned());
    GenerateRequest { max_tokens, sampling, ..GenerateRequest::new(TINY, prompt) }
}

fn regex(text: &str) -> AnswerForm {
    AnswerForm::new(FormKind::Regex, text)
}

fn ask(client: &Client, request: &GenerateRequest) -> (Answer, GenerateEnd) {
    let mut generation = client.generate(request).unwrap();
    let answer = collect(&mut generation).unwrap();
    (answer, generation.end().cloned().unwrap())
}

/// Whether the text is of the pairs, so many of them.
fn is_of_pairs(text: &str, pairs: [&str; 2], count: usize) -> bool {
    let chunks: Vec<&[u8]> = text.as_bytes().chunks(2).collect();
    chunks.len() == count && chunks.iter().all(|chunk| pairs.iter().any(|pair| pair.as_bytes() == *chunk))
}

const SCHEMA: &str = r#"{"type": "object", "additionalProperties": false, "required": ["name", "age", "tags"],
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "tags": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"enum": ["red", "green"]}}}}"#;

#[test]
fn answers_have_the_form_that_was_asked_for_and_end_when_it_is_complete() {
    let mut rig = Rig::start();
    let client = rig.client();
    for seed in 0..6 {
        let (pairs, end) = ask(&client, &story(0, seed).with_form(&regex("(ab|cd){5}")));
        assert!(is_of_pairs(&pairs.text, ["ab", "cd"], 5), "{}", pairs.text);
        assert_eq!(end.stop_reason, StopReason::EndOfGeneration);
        assert_eq!(end.usage.generated_tokens as usize, pairs.ids.len());
        let (json, end) =
            ask(&client, &story(0, seed).with_form(&AnswerForm::new(FormKind::JsonSchema, SCHEMA)));
        assert_eq!(end.stop_reason, StopReason::EndOfGeneration, "{}", json.text);
        let value: Value = serde_json::from_str(&json.text).unwrap_or_else(|e| panic!("{e}: {}", json.text));
        assert_eq!(value.as_object().unwrap().len(), 3);
        assert!(value["name"].as_str().unwrap().chars().count() <= 12);
        assert!(value["age"].as_u64().unwrap() <= 150);
        let tags = value["tags"].as_array().unwrap();
        assert!((1..=3).contains(&tags.len()) && tags.iter().all(|tag| tag == "red" || tag == "green"));
        let grammar = AnswerForm::new(FormKind::Lark, "start: \"<\" (\"x\" | start) \">\"\n");
        let (nested, _) = ask(&client, &story(200, seed).with_form(&grammar));
        let depth = nested.text.matches('<').count();
        assert_eq!(nested.text, format!("{}x{}", "<".repeat(depth), ">".repeat(depth)));
        let grammar = AnswerForm::new(FormKind::Gbnf, "root ::= pair\npair ::= \"[\" (\"y\" | pair) \"]\"\n");
        let (nested, _) = ask(&client, &story(200, seed).with_form(&grammar));
        let depth = nested.text.matches('[').count();
        assert_eq!(nested.text, format!("{}y{}", "[".repeat(depth), "]".repeat(depth)));
    }
    rig.assert_serves();
}

#[test]
fn an_answer_that_is_complete_with_its_last_token_did_not_run_out_of_tokens() {
    let rig = Rig::start();
    let client = rig.client();
    let (whole, _) = ask(&client, &story(0, 3).with_form(&regex("(ab|cd){5}")));
    let count = whole.ids.len() as u32;
    let (same, end) = ask(&client, &story(count, 3).with_form(&regex("(ab|cd){5}")));
    assert_eq!((same.ids, end.stop_reason), (whole.ids, StopReason::EndOfGeneration));
    let (_, end) = ask(&client, &story(count - 1, 3).with_form(&regex("(ab|cd){5}")));
    assert_eq!(end.stop_reason, StopReason::MaxTokens);
}

#[test]
fn forms_are_kept_when_the_context_shifts_and_when_a_place_is_given_up() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n[limits]\nrunning = 1\ncontext_tokens = 64\n");
    let client = rig.client();
    let long = story(0, 5).with_form(&regex("(ab|cd){120}")).with_context_shift(2);
    let (shifted, end) = ask(&client, &long);
    assert!(is_of_pairs(&shifted.text, ["ab", "cd"], 120), "{}", shifted.text);
    assert!(end.dropped_tokens() > 0);
    // The one that waits for credit gives its only place up, and prefills its tokens again later.
    let connection = Connection::connect(&rig.options()).unwrap();
    let mut first = connection.generate(&long).unwrap();
    let running = |seen: &rocmforge_client::wire::StatusReply| seen.devices[0].sequences_running == 1;
    rig.eventually("the first runs", running);
    let mut urgent =
        connection.generate(&story(30, 1).with_form(&regex("[a-z ]+")).with_priority(200)).unwrap();
    let text = collect(&mut urgent).unwrap().text;
    assert!(text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b' '), "{text}");
    assert_eq!(collect(&mut first).unwrap(), shifted, "the same answer as alone");
    rig.assert_serves();
}

#[test]
fn answers_beside_each_other_and_after_a_known_prompt_are_those_of_each_alone() {
    let rig = Rig::start();
    let requests: Vec<GenerateRequest> = (0..8)
        .map(|i| match i % 4 {
            0 => story(40, i).with_form(&AnswerForm::new(FormKind::JsonSchema, SCHEMA)),
            1 => story(40, i).with_form(&regex("(ab|cd){5}")),
            2 => story(40, i).with_penalties(&Penalties { repeat: 1.3, ..Penalties::default() }),
            _ => story(40, i),
        })
        .collect();
    let client = rig.client();
    let alone: Vec<Answer> = requests.iter().map(|request| answer(&client, request).unwrap()).collect();
    let connection = Connection::connect(&rig.options()).unwrap();
    let mut together: Vec<_> = requests.iter().map(|request| connection.generate(request).unwrap()).collect();
    for (alone, beside) in alone.iter().zip(&mut together) {
        assert_eq!(&collect(beside).unwrap(), alone);
    }
}

#[test]
fn penalties_and_biases_change_what_is_said() {
    let rig = Rig::start();
    let client = rig.client();
    let greedy = |penalties: &Penalties| {
        let sampling = SamplingOptions::default();
        let request = GenerateRequest { sampling, ignore_eog: true, ..story(60, 0) };
        answer(&client, &request.with_penalties(penalties)).unwrap().ids
    };
    let plain = greedy(&Penalties::default());
    assert_eq!(plain, greedy(&Penalties { repeat: 2.0, last: 0, ..Penalties::default() }), "nothing counts");
    let distinct = greedy(&Penalties { presence: 100.0, last: 4096, prompt: false, ..Penalties::default() });
    let mut sorted = distinct.clone();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(sorted.len(), 60, "no token is there twice: {distinct:?}");
    assert!(plain.iter().collect::<std::collections::HashSet<_>>().len() < 60);
    let without = greedy(&Penalties { bias: vec![(plain[0], -1000.0)], ..Penalties::default() });
    assert!(!without.contains(&plain[0]));
    let only = greedy(&Penalties { bias: vec![(300, 1000.0)], ..Penalties::default() });
    assert_eq!(only, [300; 60]);
}

/// The prompt's tokens.
fn story_ids(client: &Client) -> Vec<u32> {
    let (model, text) = (TINY.to_owned(), "Once upon a time".to_owned());
    let request = TokenizeRequest { model, text, add_special: true, parse_special: false, ext: vec![] };
    client.tokenize(&request).unwrap().ids
}

#[test]
fn samplers_change_what_is_said_and_the_same_seed_says_it_again() {
    let rig = Rig::start();
    let client = rig.client();
    let said = |seed, samplers: &Samplers| {
        let request = GenerateRequest { ignore_eog: true, ..story(60, seed) };
        answer(&client, &request.with_samplers(samplers)).unwrap().ids
    };
    let none = Samplers::default();
    let plain = said(1, &none);
    let unchanged = GenerateRequest { ignore_eog: true, ..story(60, 1) };
    assert_eq!(plain, answer(&client, &unchanged).unwrap().ids, "samplers that change nothing");
    let dry = Dry { multiplier: 100.0, base: 4.0, allowed_length: 1, breakers: vec![], ..Dry::default() };
    let all = [
        Samplers { typical_p: 0.2, ..none.clone() },
        Samplers { top_n_sigma: 1.0, ..none.clone() },
        Samplers { xtc_probability: 1.0, xtc_threshold: 0.05, ..none.clone() },
        Samplers { dynatemp_range: 1.0, ..none.clone() },
        Samplers { mirostat: true, mirostat_tau: 1.0, ..none.clone() },
        Samplers { dry: dry.clone(), ..none.clone() },
    ];
    for samplers in &all {
        let changed = said(1, samplers);
        assert_ne!(changed, plain, "{samplers:?}");
        assert_eq!(changed, said(1, samplers), "{samplers:?}");
    }
    // No two tokens follow each other twice, those of the prompt among them.
    let ids = story_ids(&client);
    let text = [ids, said(5, &Samplers { dry, ..none })].concat();
    let pairs: std::collections::HashSet<&[u32]> = text.windows(2).collect();
    assert_eq!(pairs.len(), text.len() - 1, "{text:?}");
    let greedy = SamplingOptions::default();
    let greedy = GenerateRequest { sampling: greedy, ..story(20, 1) };
    let most = answer(&client, &greedy.clone().with_samplers(&all[2])).unwrap();
    assert_eq!(most, answer(&client, &greedy).unwrap(), "temperature 0 takes the most likely token");
}

#[test]
fn mirostat_goes_on_when_a_place_is_given_up() {
    let rig = Rig::start_with("[device]\nbackend = 'cpu'\n[limits]\nrunning = 1\n");
    let client = rig.client();
    let request = GenerateRequest { ignore_eog: true, ..story(120, 9) };
    let request =
        request.with_samplers(&Samplers { mirostat: true, mirostat_tau: 2.0, ..Samplers::default() });
    let alone = answer(&client, &request).unwrap();
    let connection = Connection::connect(&rig.options()).unwrap();
    let mut first = connection.generate(&request).unwrap();
    let running = |seen: &rocmforge_client::wire::StatusReply| seen.devices[0].sequences_running == 1;
    rig.eventually("the first runs", running);
    let mut urgent = connection.generate(&story(10, 1).with_priority(200)).unwrap();
    collect(&mut urgent).unwrap();
    assert_eq!(collect(&mut first).unwrap(), alone, "the same answer as alone");
}

#[test]
fn log_probabilities_are_those_of_the_model_whatever_may_be_said() {
    let rig = Rig::start();
    let client = rig.client();
    let first = |request: GenerateRequest| {
        let sampling = SamplingOptions { top_logprobs: 5, ..SamplingOptions::default() };
        let request = GenerateRequest { sampling, max_tokens: 1, ..request };
        let item = client.generate(&request).unwrap().next_item().unwrap().unwrap();
        (item.ids[0], item.logprobs[0].clone())
    };
    let (said, plain) = first(story(1, 0));
    let (other, formed) = first(story(1, 0).with_form(&regex("[0-9]+")));
    assert_ne!(said, other);
    assert_eq!(formed.top, plain.top);
    assert!(formed.logprob < plain.top[4].logprob);
    let second = plain.top[1].id;
    let bias = vec![(second, 1000.0)];
    let (biased, told) = first(story(1, 0).with_penalties(&Penalties { bias, ..Penalties::default() }));
    assert_eq!((biased, told.logprob, told.top), (second, plain.top[1].logprob, plain.top));
}

#[test]
fn wrong_forms_and_biases_are_refused_by_their_kind() {
    let mut rig = Rig::start();
    let client = rig.client();
    let refused = |request: &GenerateRequest| code(answer(&client, request));
    let schema = |text: &str| story(5, 0).with_form(&AnswerForm::new(FormKind::JsonSchema, text));
    assert_eq!(refused(&schema("{\"type\": \"strange\"}")), ErrorCode::InvalidArgument as u16);
    assert_eq!(refused(&schema("{")), ErrorCode::InvalidArgument as u16);
    let any: String = (0..10).map(|i| format!("{{\"const\": {i}}},")).collect();
    let any = format!("{{\"anyOf\": [{}]}}", any.trim_end_matches(','));
    let exploding = format!("{{\"allOf\": [{}]}}", vec![any; 12].join(","));
    assert_eq!(refused(&schema(&exploding)), ErrorCode::LimitExceeded as u16);
    assert_eq!(refused(&story(5, 0).with_form(&regex("a("))), ErrorCode::InvalidArgument as u16);
    let gbnf = AnswerForm::new(FormKind::Gbnf, "root ::= nowhere");
    assert_eq!(refused(&story(5, 0).with_form(&gbnf)), ErrorCode::InvalidArgument as u16);
    let biased =
        |id, bias| story(5, 0).with_penalties(&Penalties { bias: vec![(id, bias)], ..Penalties::default() });
    assert_eq!(refused(&biased(512, 1.0)), ErrorCode::TokenOutOfRange as u16);
    assert_eq!(refused(&biased(5, 2000.0)), ErrorCode::InvalidArgument as u16);
    let sampled = |samplers: &Samplers| refused(&story(5, 0).with_samplers(samplers));
    let wide = Samplers { typical_p: 1.5, ..Samplers::default() };
    assert_eq!(sampled(&wide), ErrorCode::InvalidArgument as u16);
    for key in [EXT_GENERATE_FORM, EXT_GENERATE_PENALTIES, EXT_GENERATE_SAMPLERS] {
        let mut request = story(5, 0);
        request.ext.push((key, vec![9, 9]));
        assert_eq!(refused(&request), ErrorCode::InvalidArgument as u16);
    }
    rig.assert_serves();
}

/// A row of optional parts takes memory by the square of its length. Without the trial eight such forms took 24 GB.
#[test]
fn forms_that_would_take_all_memory_are_refused_and_cost_the_daemon_none() {
    let mut rig = Rig::start();
    let terminals = format!("start: T\nO: \"a\"?\nT: {}", "O ".repeat(20_000));
    let forms = [
        regex(&"a?".repeat(30_000)),
        regex(&"(()|a)".repeat(10_000)),
        AnswerForm::new(FormKind::Lark, &terminals),
        AnswerForm::new(
            FormKind::JsonSchema,
            &format!(r#"{{"type":"string","pattern":"^{}$"}}"#, r"a\u003f".repeat(9_000)),
        ),
    ];
    let before = anonymous(&rig);
    for form in &forms {
        let refused = code(answer(&rig.client(), &story(8, 1).with_form(form)));
        let codes = [ErrorCode::LimitExceeded as u16, ErrorCode::InvalidArgument as u16];
        assert!(codes.contains(&refused), "{refused}: {:.40}", form.text);
        let more = anonymous(&rig).saturating_sub(before) >> 20;
        assert!(more < 100, "{more} MiB more: {:.40}", form.text);
    }
    rig.assert_serves();
}
