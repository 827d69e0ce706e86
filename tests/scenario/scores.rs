//! Log-probabilities of a prompt's tokens, through the socket.

use rocmforge_client::wire::{
    DetokenizeRequest, EACH_TOKENS_MAX, ErrorCode, GenerateRequest, Prompt, SamplingOptions, TokenLogprob,
};
use rocmforge_client::{Client, Connection};

use crate::rig::{Rig, TINY, answer, code, collect};

const TEXT: &str = "Once upon a time, there was a little girl named Lily. She loved to play outside.";

fn request(prompt: Prompt) -> GenerateRequest {
    let sampling = SamplingOptions { top_logprobs: 5, ..SamplingOptions::default() };
    GenerateRequest { sampling, ignore_eog: true, max_tokens: 20, ..GenerateRequest::new(TINY, prompt) }
}

/// The answer's tokens.
struct Said {
    ids: Vec<u32>,
    logprobs: Vec<TokenLogprob>,
}

/// The prompt's ids, its scores and the answer's ids, with the answer's log-probabilities.
fn scored(client: &Client, request: &GenerateRequest) -> (Vec<u32>, Vec<TokenLogprob>, Said) {
    let mut generation = client.generate(request).unwrap();
    let first = generation.next_item().unwrap().unwrap();
    assert!(
        first.ids.is_empty() && first.logprobs.is_empty() || first.prompt_ids.len() == 1,
        "the ids alone"
    );
    let (mut scores, mut said) = (Vec::new(), Said { ids: first.ids, logprobs: first.logprobs });
    while let Some(mut item) = generation.next_item().unwrap() {
        assert!(item.prompt_ids.is_empty());
        if item.ids.is_empty() {
            assert!(said.ids.is_empty(), "the prompt comes before the answer");
            scores.append(&mut item.logprobs);
        } else {
            said.ids.append(&mut item.ids);
            said.logprobs.append(&mut item.logprobs);
        }
    }
    (first.prompt_ids, scores, said)
}

fn near(a: &TokenLogprob, b: &TokenLogprob) {
    assert!((a.logprob - b.logprob).abs() < 1e-3, "{a:?} {b:?}");
    assert_eq!(a.top.len(), b.top.len());
    for (a, b) in a.top.iter().zip(&b.top) {
        assert!((a.logprob - b.logprob).abs() < 1e-3, "{a:?} {b:?}");
    }
}

#[test]
fn a_text_has_the_log_probabilities_that_answers_told() {
    let rig = Rig::start();
    let client = rig.client();
    let plain = answer(&client, &request(Prompt::Text(TEXT.into()))).unwrap();
    let (ids, scores, said) = scored(&client, &request(Prompt::Text(TEXT.into())).with_scores(5));
    assert_eq!((ids.len(), said.ids.clone()), (scores.len() + 1, plain.ids.clone()), "the same answer");
    // A prompt that is the answer's text has the log-probabilities that its tokens were drawn with.
    let whole = [ids.clone(), said.ids.clone()].concat();
    let (again, all, _) = scored(&client, &request(Prompt::Ids(whole.clone())).with_scores(5));
    assert_eq!(again, whole);
    all.iter().zip(scores.iter().chain(&said.logprobs)).for_each(|(a, b)| near(a, b));
    assert_eq!(all.len(), ids.len() + said.ids.len() - 1);
    // Each token's log-probability is the one among the likely ones after the tokens before.
    for at in [1, 5, ids.len() - 1] {
        let before = request(Prompt::Ids(ids[..at].to_vec()));
        let before = GenerateRequest { max_tokens: 1, ..before };
        let item = client.generate(&before).unwrap().next_item().unwrap().unwrap();
        let told = &scores[at - 1];
        for (a, b) in told.top.iter().zip(&item.logprobs[0].top) {
            assert!((a.logprob - b.logprob).abs() < 1e-3);
        }
        if let Some(same) = item.logprobs[0].top.iter().find(|top| top.id == ids[at]) {
            assert!((same.logprob - told.logprob).abs() < 1e-3);
        }
    }
    let (_, none, _) = scored(&client, &request(Prompt::Text(TEXT.into())).with_scores(0));
    assert!(none.iter().zip(&scores).all(|(a, b)| a.top.is_empty() && (a.logprob - b.logprob).abs() < 1e-3));
    let (one, nothing, _) = scored(&client, &request(Prompt::Ids(vec![1])).with_scores(2));
    assert_eq!((one, nothing.len()), (vec![1], 0));
}

#[test]
fn scores_come_once_in_small_steps_and_when_a_place_is_given_up() {
    for running in [1, 2, 64] {
        let mut rig = Rig::start_with(&format!(
            "[device]\nbackend = 'cpu'\n[limits]\nrunning = {running}\ncontext_tokens = 512\n"
        ));
        let client = rig.client();
        let ids: Vec<u32> = (0..400).map(|at| 3 + at * 7 % 500).collect();
        let (_, alone, _) = scored(&client, &request(Prompt::Ids(ids.clone())).with_scores(1));
        assert_eq!(alone.len(), 399);
        let connection = Connection::connect(&rig.options()).unwrap();
        let mut slow = connection.generate(&request(Prompt::Ids(ids.clone())).with_scores(1)).unwrap();
        let mut others: Vec<_> = (0..6)
            .map(|i| {
                let prompt = Prompt::Ids(ids[i..i + 150].to_vec());
                let request = request(prompt).with_priority(200);
                connection.generate(&if i % 2 == 0 { request.with_scores(3) } else { request }).unwrap()
            })
            .collect();
        for other in &mut others {
            assert_eq!(collect(other).unwrap().ids.len(), 20);
        }
        let mut scores = Vec::new();
        while let Some(item) = slow.next_item().unwrap() {
            if item.ids.is_empty() {
                scores.extend(item.logprobs);
            }
        }
        assert_eq!(scores.len(), 399);
        scores.iter().zip(&alone).for_each(|(a, b)| near(a, b));
        rig.assert_serves();
    }
}

#[test]
fn scores_are_not_for_sessions_and_their_number_is_bounded() {
    let rig = Rig::start();
    let client = rig.client();
    let refused = |request: &GenerateRequest| code(answer(&client, request));
    let with_session = request(Prompt::Text(TEXT.into())).with_scores(1).with_session("s");
    assert_eq!(refused(&with_session), ErrorCode::InvalidArgument as u16);
    assert_eq!(
        refused(&request(Prompt::Text(TEXT.into())).with_scores(21)),
        ErrorCode::InvalidArgument as u16
    );
}

#[test]
fn tokens_have_their_texts_each_for_itself() {
    let rig = Rig::start();
    let client = rig.client();
    let (ids, _, _) = scored(&client, &request(Prompt::Text("Lily saw a dog, ß".into())).with_scores(0));
    let each = |ids: Vec<u32>| client.detokenize(&DetokenizeRequest::each(TINY, ids));
    let reply = each(ids.clone()).unwrap();
    let texts = reply.each().unwrap();
    assert_eq!(texts.len(), ids.len());
    assert_eq!((texts[0], &texts[1..3]), ("<s>", &[" Lily", " saw"][..]), "{texts:?}");
    for (id, text) in ids.iter().zip(&texts) {
        assert_eq!(each(vec![*id]).unwrap().text, *text);
    }
    assert_eq!(each(vec![]).unwrap().each(), Some(vec![]));
    assert_eq!(each(vec![5; EACH_TOKENS_MAX]).unwrap().each().unwrap().len(), EACH_TOKENS_MAX);
    let error = each(vec![5; EACH_TOKENS_MAX + 1]).unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::LimitExceeded as u16));
}
