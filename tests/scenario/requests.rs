//! Requests that cannot be served: typed errors with the numbers, on a connection that stays open.

use rocmforge_client::wire::{
    self, ChatMessage, CheckState, DetokenizeRequest, ErrorCode, GenerateRequest, Op, Prompt,
    SamplingOptions, StopReason, TokenizeRequest,
};
use rocmforge_client::{Client, Connection};

use crate::common;
use crate::forge::{Value, wide_llama};
use crate::raw::{Raw, header};
use crate::rig::{Rig, TINY, answer, code, collect, refusal, story};

fn ids(ids: Vec<u32>) -> GenerateRequest {
    GenerateRequest { max_tokens: 4, ..GenerateRequest::new(TINY, Prompt::Ids(ids)) }
}

fn tokenize(client: &Client, text: &str) -> Vec<u32> {
    let request = TokenizeRequest {
        model: TINY.into(),
        text: text.into(),
        add_special: true,
        parse_special: false,
        ext: vec![],
    };
    client.tokenize(&request).unwrap().ids
}

#[test]
fn requests_that_the_model_cannot_take_are_refused_with_numbers() {
    let mut rig = Rig::start();
    let client = rig.client();
    let cases = [
        (ids(vec![1; 512]), ErrorCode::PromptTooLong, "512 tokens"),
        (ids(vec![1; 5000]), ErrorCode::PromptTooLong, "5000 tokens"),
        (ids(vec![1, 512]), ErrorCode::TokenOutOfRange, "512 tokens"),
        (ids(vec![u32::MAX]), ErrorCode::TokenOutOfRange, "4294967295"),
        (ids(vec![]), ErrorCode::EmptyPrompt, "no tokens"),
        (GenerateRequest::new("nobody", Prompt::Ids(vec![1])), ErrorCode::ModelNotFound, "nobody"),
        (GenerateRequest { stop: vec![String::new()], ..story(4) }, ErrorCode::InvalidArgument, "stop"),
        (
            GenerateRequest { sampling: SamplingOptions { top_p: 1.5, ..Default::default() }, ..story(4) },
            ErrorCode::InvalidArgument,
            "top_p",
        ),
    ];
    for (request, code, says) in cases {
        let error = refusal(answer(&client, &request));
        assert_eq!(error.code, code as u16, "{error:?}");
        assert!(error.message.contains(says), "{:?} does not say {says:?}", error.message);
    }
    let chat = Prompt::Chat(vec![ChatMessage { role: "user".into(), content: "hello".into() }]);
    let error = refusal(answer(&client, &GenerateRequest::new(TINY, chat)));
    assert_eq!(error.code, ErrorCode::NoChatTemplate as u16);
    rig.assert_serves();
    rig.assert_idle();
}

#[test]
fn an_answer_ends_where_the_context_does() {
    let rig = Rig::start();
    let client = rig.client();
    let mut generation = client.generate(&GenerateRequest { max_tokens: 0, ..story(0) }).unwrap();
    let whole = collect(&mut generation).unwrap();
    let end = generation.end().unwrap();
    assert_eq!(whole.prompt_ids.len() + whole.ids.len(), 512);
    assert!(matches!(end.stop_reason, StopReason::ContextFull | StopReason::MaxTokens), "{end:?}");
    assert_eq!(end.usage.generated_tokens as usize, whole.ids.len());
    assert_eq!(end.usage.prompt_tokens as usize, whole.prompt_ids.len());

    let limited = Rig::start_with("[limits]\ncontext_tokens = 64");
    let short = answer(&limited.client(), &GenerateRequest { max_tokens: 0, ..story(0) }).unwrap();
    assert_eq!(short.prompt_ids.len() + short.ids.len(), 64);
    assert_eq!(short.ids[..], whole.ids[..short.ids.len()]);
    let error = refusal(answer(&limited.client(), &ids(vec![1; 64])));
    assert_eq!(error.code, ErrorCode::PromptTooLong as u16);
    assert!(error.message.contains("limits.context_tokens 64"), "{}", error.message);
}

#[test]
fn text_and_ids_are_the_same_prompt_and_come_back_as_text() {
    let rig = Rig::start();
    let client = rig.client();
    let prompt = tokenize(&client, "Once upon a time");
    let by_text = answer(&client, &story(16)).unwrap();
    let request = GenerateRequest { ignore_eog: true, max_tokens: 16, ..ids(prompt.clone()) };
    let by_ids = answer(&client, &request).unwrap();
    assert_eq!((&by_text.prompt_ids, &by_text.ids), (&prompt, &by_ids.ids));
    let request =
        DetokenizeRequest { model: TINY.into(), ids: prompt.clone(), show_special: false, ext: vec![] };
    assert_eq!(client.detokenize(&request).unwrap().text, "Once upon a time");
    let error = refusal(client.detokenize(&DetokenizeRequest { ids: vec![9999], ..request }));
    assert_eq!(error.code, ErrorCode::TokenOutOfRange as u16);

    let stopped = answer(&client, &GenerateRequest { stop: vec!["little".into()], ..story(16) }).unwrap();
    assert_eq!(stopped.text, ", there was a ");
}

#[test]
fn large_requests_leave_no_memory_behind() {
    let rig = Rig::start();
    let client = rig.client();
    let text = "Once upon a time there was a wonderful thing that happened in the forest. ".repeat(6500);
    tokenize(&client, "warm");
    let before = client.status().unwrap().rss_anon_bytes;
    for _ in 0..2 {
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert!(tokenize(&rig.client(), &text).len() > 50_000));
            }
        });
    }
    // Allows for several heaps of threads, but not for memory of split texts: that is 15 MB a text.
    let limit = before + (48 << 20);
    rig.eventually("the memory is freed", |status| status.rss_anon_bytes < limit);
}

#[test]
fn a_seed_repeats_an_answer() {
    let rig = Rig::start();
    let client = rig.client();
    let sampling = SamplingOptions { temperature: 1.0, seed: Some(7), ..Default::default() };
    let request = GenerateRequest { sampling, ..story(32) };
    let first = answer(&client, &request).unwrap();
    assert_eq!(answer(&client, &request).unwrap(), first);
    let mut generation = client
        .generate(&GenerateRequest {
            sampling: SamplingOptions { seed: None, ..request.sampling.clone() },
            ..request.clone()
        })
        .unwrap();
    let random = collect(&mut generation).unwrap();
    let seed = generation.end().unwrap().seed;
    let again = GenerateRequest {
        sampling: SamplingOptions { seed: Some(seed), ..request.sampling.clone() },
        ..request
    };
    assert_eq!(answer(&client, &again).unwrap(), random, "the reported seed gave another answer");
}

#[test]
fn every_code_can_be_asked_for() {
    let rig = Rig::start();
    let client = rig.client();
    for code in ErrorCode::ALL.iter().filter(|code| **code as u16 >= 200) {
        assert_eq!(client.fail(*code as u16).code(), Some(*code as u16));
    }
    assert_eq!(client.fail(999).code(), Some(ErrorCode::InvalidArgument as u16));
}

#[test]
fn unknown_ops_and_payloads_fail_their_stream_alone() {
    let mut rig = Rig::start();
    let mut raw = Raw::connect(&rig);
    raw.write(&header(0, 1, 4000, 0, 0));
    let (stream, error) = raw.error();
    assert_eq!((stream, error.code), (1, ErrorCode::UnknownOp as u16));
    raw.write(&header(3, 3, Op::Ping as u16, 0, 0));
    raw.write(b"abc");
    let (stream, error) = raw.error();
    assert_eq!((stream, error.code), (3, ErrorCode::BadPayload as u16));
    let critical = wire::PingRequest { payload: vec![], ext: vec![(1, vec![])] };
    raw.send(5, Op::Ping, &critical);
    assert_eq!(raw.receive().0.known_op(), Some(Op::Reply), "an optional extension was not ignored");
    rig.assert_serves();
}

#[test]
fn a_deadline_ends_a_request_that_waits_and_a_request_that_runs() {
    let mut rig = Rig::start();
    let connection = Connection::connect(&rig.options()).unwrap();
    // A client that does not read stalls its request: it waits for credit then.
    let mut generation = connection.generate(&GenerateRequest { timeout_ms: 300, ..story(500) }).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(400));
    assert_eq!(code(collect(&mut generation)), ErrorCode::DeadlineExceeded as u16);
    rig.assert_serves();
    rig.assert_idle();
}

#[test]
fn repeated_loads_with_one_number_are_one_load() {
    let rig = Rig::start();
    let connection = Connection::connect(&rig.options()).unwrap();
    let load = wire::LoadRequest { name: TINY.into(), by_descriptor: false, request_id: 77, ext: vec![] };
    let first = connection.call(&load).unwrap();
    assert!(first.mapped_now);
    assert_eq!(first.summary.sequences, 0, "the load counts itself as a sequence");
    assert_eq!(connection.call(&load).unwrap(), first, "a repeated request got another answer");
    assert!(!connection.call(&wire::LoadRequest { request_id: 78, ..load.clone() }).unwrap().mapped_now);
    let other = wire::LoadRequest { name: "other".into(), ..load };
    assert_eq!(code(connection.call(&other)), ErrorCode::InvalidArgument as u16);
}

#[test]
fn an_unload_whose_client_hung_up_is_answered_to_who_asks_again() {
    let rig = Rig::start();
    for request_id in 1..=30 {
        let connection = Connection::connect(&rig.options()).unwrap();
        let load = wire::LoadRequest { name: TINY.into(), by_descriptor: false, request_id: 0, ext: vec![] };
        assert!(connection.call(&load).unwrap().mapped_now);
        let unload = wire::UnloadRequest { name: TINY.into(), request_id, ext: vec![] };
        let mut raw = Raw::connect(&rig);
        raw.send(1, Op::Unload, &unload);
        drop(raw);
        assert!(connection.call(&unload).unwrap().was_mapped, "a repeated unload got another answer");
    }
}

#[test]
fn a_chat_is_put_through_the_models_own_template() {
    let Some(smollm2) = common::smollm2() else { return };
    let rig = Rig::start();
    std::os::unix::fs::symlink(smollm2, rig.model("smollm2")).unwrap();
    let client = rig.client();
    let chat = |role: &str, content: &str| ChatMessage { role: role.into(), content: content.into() };
    let messages = vec![chat("system", "You are terse."), chat("user", "Say yes.")];
    let request =
        GenerateRequest { max_tokens: 4, ..GenerateRequest::new("smollm2", Prompt::Chat(messages)) };
    let answer = answer(&client, &request).unwrap();
    let shown = DetokenizeRequest {
        model: "smollm2".into(),
        ids: answer.prompt_ids.clone(),
        show_special: true,
        ext: vec![],
    };
    assert_eq!(
        client.detokenize(&shown).unwrap().text,
        "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    );
    // Memory of the answer besides the file: the keys and values of its pages, and working memory.
    let status = client.status().unwrap();
    let limit = status.devices[0].kv_bytes + (64 << 20);
    assert!(status.rss_anon_bytes <= limit, "{} bytes of memory, limit {limit}", status.rss_anon_bytes);
}

#[test]
fn without_a_gpu_the_doctor_says_what_is_missing_and_the_daemon_serves() {
    let mut rig = Rig::idle();
    let library = "/nowhere/libamdhip64.so.7";
    let mut command = rig.command();
    rig.spawn(command.env("ROCMFORGE_HIP_LIB", library));
    let client = rig.client();
    let report = client.doctor().unwrap();
    let runtime = report.checks.iter().find(|check| check.name == "HIP runtime").unwrap();
    assert!(runtime.found.contains(library) && runtime.state != CheckState::Good, "{runtime:?}");
    assert!(report.gpus.is_empty(), "{report:?}");
    let names: Vec<_> = report.checks.iter().map(|check| check.name.as_str()).collect();
    assert_eq!(names, ["AMD GPU", "/dev/kfd", "/dev/dri", "HIP runtime", "you may"]);
    rig.assert_serves();
}

#[test]
fn a_request_that_can_never_fit_is_refused_with_its_numbers() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n[kv]\nbudget_mib = 1");
    let long = wide_llama(7).set("llama.context_length", Value::u32(4096));
    std::fs::write(rig.model("long"), long.build().bytes).unwrap();
    let request = |max_tokens| GenerateRequest { model: "long".into(), ..story(max_tokens) };
    let error = refusal(answer(&rig.client(), &request(4000)));
    assert_eq!((error.code, error.retryable), (ErrorCode::DoesNotFit as u16, false), "{error}");
    let detail = |key: &str| -> u64 {
        let entry = error.detail.iter().find(|entry| entry.key == key).expect(key);
        entry.value.parse().unwrap()
    };
    let (tokens, need, budget) = (detail("context_tokens"), detail("need_bytes"), detail("budget_bytes"));
    // Keys and values of 256 elements of two bytes in each of two layers, for the tokens of request and prompt.
    assert!(tokens > 4000 && need >= tokens * 2 * 2 * 256 * 2 && budget == 1 << 20, "{error}");
    let need = need as f64 / f64::from(1 << 20);
    assert_eq!(
        error.message,
        format!(
            "the KV cache for {tokens} tokens needs {need:.1} MiB; the budget is 1.0 MiB: ask for fewer tokens or raise \
             kv.budget_mib"
        )
    );
    assert!(!answer(&rig.client(), &request(20)).unwrap().ids.is_empty(), "a shorter request got no tokens");
    rig.assert_serves();
}

#[test]
fn a_request_above_one_users_part_of_the_keys_and_values_is_refused_with_its_numbers() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n[kv]\nbudget_mib = 2\npercent_per_uid = 50");
    let long = wide_llama(7).set("llama.context_length", Value::u32(4096));
    std::fs::write(rig.model("long"), long.build().bytes).unwrap();
    let request = |max_tokens| GenerateRequest { model: "long".into(), ..story(max_tokens) };
    let error = refusal(answer(&rig.client(), &request(700)));
    assert_eq!((error.code, error.retryable), (ErrorCode::DoesNotFit as u16, false), "{error}");
    let detail: Vec<_> = error.detail.iter().map(|d| (d.key.as_str(), d.value.as_str())).collect();
    assert!(
        detail.contains(&("share_bytes", "1048576")) && detail.contains(&("percent", "50")),
        "{detail:?}"
    );
    let says =
        "; one user may hold 1.0 MiB, which is 50 % of it: ask for fewer tokens or raise kv.percent_per_uid";
    assert!(error.message.ends_with(says), "{error}");
    assert!(!answer(&rig.client(), &request(20)).unwrap().ids.is_empty(), "a shorter request got no tokens");
    rig.assert_serves();
}
