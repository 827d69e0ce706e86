//! Malformed models and a real daemon: each is refused with its code, by name and by descriptor, and the daemon serves
//! as before.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rocmforge_client::wire::{ChatMessage, ErrorCode, GenerateRequest, Prompt, SamplingOptions};

use crate::malformed::{Case, cases, numbers, templates};
use crate::rig::{Rig, anonymous, answer, code};

/// Limit of memory growth after all refusals.
const LEFT_BYTES_MAX: u64 = 16 << 20;

#[test]
fn a_daemon_refuses_every_malformed_model_and_keeps_nothing_of_it() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n");
    let all = cases();
    let name = |number: usize| format!("case{number}");
    all.iter().enumerate().for_each(|(n, case)| case.write(&rig.dir.path().join("models"), &name(n)));
    let client = rig.client();
    rig.assert_serves();
    let (before, descriptors) = (anonymous(&rig), rig.descriptors());
    let mut slowest = (Duration::ZERO, String::new());
    let mut faults = Vec::new();
    for (number, case) in all.iter().enumerate() {
        let begun = Instant::now();
        let result = client.load(&name(number));
        let refused = result.as_ref().err().map(|error| error.code().expect("the error is not the daemon's"));
        if refused.is_some() {
            slowest = slowest.max((begun.elapsed(), case.what.clone()));
        } else {
            client.unload(&name(number)).unwrap();
        }
        if refused != case.code.map(|code| code as u16) {
            faults.push(format!("{}: {refused:?} instead of {:?}", case.what, case.code));
        }
    }
    println!("slowest refusal of {}: {:?}, {}", all.len(), slowest.0, slowest.1);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    rig.eventually("only the good model is mapped", |status| status.models_mapped == 1);
    let left = anonymous(&rig).saturating_sub(before);
    println!("memory grew by {} KiB", left >> 10);
    assert!(left <= LEFT_BYTES_MAX, "memory grew by {left} bytes");
    // Plus the client's connection, which was not open when they were counted.
    rig.assert_descriptors(descriptors + 1);
    rig.assert_serves();
}

/// A client's own files: outside the model directories, so the daemon does not know them before.
#[test]
fn malformed_files_passed_by_descriptor_are_refused_and_closed() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n");
    let client = rig.client();
    client.ping(b"").unwrap();
    let descriptors = rig.descriptors();
    let path = rig.dir.path().join("passed");
    let plain = |case: &Case| case.bytes().map(<[u8]>::to_vec).zip(case.code);
    let mut passed = 0;
    for (bytes, code_wanted) in cases().iter().filter_map(plain).step_by(3) {
        fs::write(&path, bytes).unwrap();
        let file = File::open(&path).unwrap();
        assert_eq!(code(client.load_descriptor(file.as_fd(), "passed")), code_wanted as u16);
        passed += 1;
    }
    assert!(passed >= 100, "{passed}");
    rig.assert_descriptors(descriptors);
    assert_eq!(client.list().unwrap().models.len(), 1, "a refused file got a name");
    rig.assert_serves();
}

#[test]
fn a_hostile_template_fails_its_chats_alone() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n");
    let client = rig.client();
    for (what, forge) in templates() {
        fs::write(rig.model("chat"), forge.build().bytes).unwrap();
        let chat = Prompt::Chat(vec![ChatMessage { role: "user".into(), content: "ab".into() }]);
        let result = answer(&client, &GenerateRequest::new("chat", chat));
        assert_eq!(code(result), ErrorCode::TemplateFailed as u16, "{what}");
        let plain =
            GenerateRequest { max_tokens: 2, ..GenerateRequest::new("chat", Prompt::Text("ab".into())) };
        answer(&client, &plain).unwrap_or_else(|error| panic!("{what}: a plain prompt was refused: {error}"));
    }
    rig.assert_serves();
}

/// Weights that are NaN or infinite: a finite answer or a refusal with the reason, never a hang or a crash.
#[test]
fn weights_that_are_no_numbers_are_told_and_harm_nobody() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n");
    let client = rig.client();
    let (mut answered, mut refused) = (0, 0);
    for dtype in rocmforge::backend::cpu::quant::SUPPORTED {
        let of_type = format!("{dtype}: ");
        assert!(numbers().iter().any(|case| case.what.starts_with(&of_type)), "no case of {dtype}");
    }
    for case in numbers() {
        fs::write(rig.model("numbers"), case.forge.build().bytes).unwrap();
        for temperature in [0.0, 0.8] {
            let mut request = GenerateRequest::new("numbers", Prompt::Text("ab ba".into()));
            // A drawn token is read in the next step, and its own row may be the bad one.
            request.max_tokens = if case.answers { 1 } else { 3 };
            request.ignore_eog = true;
            request.sampling = SamplingOptions { temperature, top_logprobs: 4, ..request.sampling };
            match finite_answer(&client, &request) {
                Ok(finite) => {
                    assert!(finite, "{}: a log-probability is not a number", case.what);
                    answered += 1;
                }
                Err(error) => {
                    assert!(!case.answers, "{}: {error}", case.what);
                    assert_eq!(error.code(), Some(ErrorCode::ModelCorrupt as u16), "{}: {error}", case.what);
                    refused += 1;
                }
            }
        }
        rig.assert_idle();
    }
    println!("{answered} answers, {refused} refusals");
    assert!(answered >= 24 && refused >= 24);
    rig.assert_serves();
}

/// Whether all log-probabilities of an answer are numbers.
fn finite_answer(
    client: &rocmforge_client::Client,
    request: &GenerateRequest,
) -> Result<bool, rocmforge_client::ClientError> {
    let mut generation = client.generate(request)?;
    let (mut finite, mut seen) = (true, 0);
    while let Some(item) = generation.next_item()? {
        for logprob in &item.logprobs {
            // A token that cannot be drawn has a probability of 0, a log-probability of -inf; the drawn token has not.
            finite &= logprob.logprob.is_finite() && logprob.top.iter().all(|top| !top.logprob.is_nan());
            seen += 1;
        }
    }
    assert!(seen > 0, "the answer has no log-probabilities");
    Ok(finite)
}
