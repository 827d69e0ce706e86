//! Extensions of requests: priorities among those of one user, and answers that go on when the context is full.

use rocmforge_client::wire::{ErrorCode, GenerateEnd, GenerateRequest, Prompt, StopReason};
use rocmforge_client::{Client, Connection};

use crate::rig::{Answer, Rig, TINY, code, collect};

fn ids(ids: Vec<u32>, max_tokens: u32) -> GenerateRequest {
    GenerateRequest { max_tokens, ignore_eog: true, ..GenerateRequest::new(TINY, Prompt::Ids(ids)) }
}

fn prompt(count: u32) -> Vec<u32> {
    (0..count).map(|i| 260 + i * 7 % 200).collect()
}

fn ask(client: &Client, request: &GenerateRequest) -> (Answer, GenerateEnd) {
    let mut generation = client.generate(request).unwrap();
    let answer = collect(&mut generation).unwrap();
    (answer, generation.end().cloned().unwrap())
}

#[test]
fn a_request_of_a_higher_priority_overtakes_those_of_its_user() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n[limits]\nrunning = 1\n");
    let connection = Connection::connect(&rig.options()).unwrap();
    // It takes no item, so the place is taken until its credit is used up and granted.
    let mut first = connection.generate(&ids(prompt(300), 150)).unwrap();
    let running = |seen: &rocmforge_client::wire::StatusReply| seen.devices[0].sequences_running == 1;
    rig.eventually("the first runs", running);
    let mut usual = connection.generate(&ids(prompt(20), 30)).unwrap();
    let mut urgent = connection.generate(&ids(prompt(21), 30).with_priority(200)).unwrap();
    collect(&mut urgent).unwrap();
    collect(&mut usual).unwrap();
    assert_eq!(collect(&mut first).unwrap().ids.len(), 150, "it gave its place up, and went on");
    let waited = |end: Option<&GenerateEnd>| end.unwrap().timings.queue_us;
    assert!(waited(urgent.end()) < waited(usual.end()), "the later one was served first");
    rig.assert_serves();
}

#[test]
fn an_answer_goes_on_beyond_the_context_as_fresh_requests_for_the_kept_tokens_would() {
    const CONTEXT: usize = 64;
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n[limits]\ncontext_tokens = 64\n");
    let client = rig.client();
    let (full, end) = ask(&client, &ids(prompt(20), 150));
    assert_eq!((end.stop_reason, full.ids.len(), end.dropped_tokens()), (StopReason::ContextFull, 44, 0));
    for kept in [0, 3, 20] {
        let (answer, end) = ask(&client, &ids(prompt(20), 150).with_context_shift(kept));
        assert_eq!((end.stop_reason, answer.ids.len()), (StopReason::MaxTokens, 150));
        assert!(end.dropped_tokens() >= 20 + 150 - CONTEXT as u64, "{}", end.dropped_tokens());
        let (mut known, mut left, mut fresh) = (prompt(20), answer.ids.as_slice(), 0);
        while !left.is_empty() {
            let count = (CONTEXT - known.len()).min(left.len());
            let (alone, _) = ask(&client, &ids(known.clone(), count as u32));
            assert_eq!(alone.ids, left[..count], "{kept} kept, request {fresh}");
            known.extend(&left[..count]);
            left = &left[count..];
            let half = (known.len() - kept as usize) / 2;
            known.drain(kept as usize..kept as usize + half);
            fresh += 1;
        }
        assert!(fresh > 3, "the context was full {fresh} times");
    }
    let with_session = ids(prompt(20), 150).with_session("s").with_context_shift(1);
    let refused = client.generate(&with_session).and_then(|mut generation| collect(&mut generation));
    assert_eq!(code(refused), ErrorCode::InvalidArgument as u16);
    // Without an end, until the client cancels it.
    let mut endless = client.generate(&ids(prompt(20), 0).with_context_shift(1)).unwrap();
    for _ in 0..300 {
        endless.next_item().unwrap().unwrap();
    }
    drop(endless);
    rig.assert_serves();
    rig.assert_idle();
}
