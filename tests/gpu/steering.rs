//! Logits that are changed and masked on the device, beside rows that are not.

use std::collections::BTreeMap;
use std::sync::Arc;

use rocmforge::backend::Chain;
use rocmforge::model::Model;
use rocmforge::model::constraint::{ConstraintKind, ConstraintSource, Trial};
use rocmforge::scheduler::{Mirostat, Penalties, Sampling, Steering};
use rocmforge::share::Taker;

use crate::common::tinystories;
use crate::rig::{Rig, model};

const PROMPT: [u32; 4] = [1, 403, 407, 261];

fn regex(model: &Model, text: &str) -> Steering {
    let source = ConstraintSource { kind: ConstraintKind::Regex, text: text.to_owned() };
    let constraint = model
        .tokenizer
        .constraints()
        .unwrap()
        .compile(&source, Taker { uid: 0, privileged: true }, Trial::new(env!("CARGO_BIN_EXE_rocmforged")))
        .unwrap();
    Steering { constraint: Some(constraint), ..Steering::default() }
}

fn biased(bias: impl IntoIterator<Item = (u32, f32)>) -> Steering {
    let penalties = Penalties { bias: BTreeMap::from_iter(bias), ..Penalties::NONE };
    Steering { penalties: Some(penalties), ..Steering::default() }
}

fn text(model: &Model, ids: &[u32]) -> String {
    model.tokenizer.decode(ids, false).unwrap()
}

#[test]
fn steered_answers_keep_to_their_limits_and_others_beside_them_stay_the_same() {
    let Some(rig) = Rig::open() else { return };
    let model: Arc<Model> = model(1, &tinystories());
    let plain = rig.ask_with_logprobs(&model, &PROMPT, 30, 3);
    for top in [0, 3] {
        let formed = rig.submit_steered(&model, &PROMPT, 200, top, regex(&model, "([0-9]{3}-){4}x"));
        let beside = rig.submit_steered(&model, &PROMPT, 30, 3, Steering::default());
        let distinct = Penalties { presence: 1000.0, last: 100, ..Penalties::NONE };
        let distinct = Steering { penalties: Some(distinct), ..Steering::default() };
        let distinct = rig.submit_steered(&model, &PROMPT, 40, top, distinct);
        let (formed, beside, distinct) = (formed.finish(), beside.finish(), distinct.finish());
        formed.end.unwrap();
        let said = text(&model, &formed.ids);
        let right = |(at, byte): (usize, u8)| match at {
            16 => byte == b'x',
            _ if at % 4 == 3 => byte == b'-',
            _ => byte.is_ascii_digit(),
        };
        assert!(said.len() == 17 && said.bytes().enumerate().all(right), "{said}");
        assert_eq!((beside.ids, beside.logprobs), (plain.ids.clone(), plain.logprobs.clone()));
        let mut ids = distinct.ids.clone();
        ids.extend(PROMPT);
        ids.sort_unstable();
        assert!(ids.windows(2).all(|pair| pair[0] != pair[1]), "{:?}", distinct.ids);
    }
}

/// So few standard deviations keep one token: the most likely one.
fn narrow() -> Steering {
    Steering { chain: Some(Chain { top_n_sigma: 1e-6, ..Chain::NONE }), ..Steering::default() }
}

#[test]
fn the_host_draws_from_the_logits_of_the_row_that_asked_for_it() {
    let Some(rig) = Rig::open() else { return };
    let model: Arc<Model> = model(1, &tinystories());
    for top_logprobs in [0, 3] {
        let plain = rig.ask_with_logprobs(&model, &PROMPT, 30, top_logprobs);
        let other = rig.ask_with_logprobs(&model, &PROMPT[..2], 30, top_logprobs);
        let sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 5, top_logprobs };
        let submit =
            |prompt: &[u32], steering| rig.submit_sampled(&model, prompt, 30, sampling.clone(), steering);
        let (first, beside) = (submit(&PROMPT, narrow()), submit(&PROMPT[..2], narrow()));
        let forbidden = biased([(plain.ids[0], -1000.0)]);
        let changed = submit(&PROMPT, Steering { penalties: forbidden.penalties, ..narrow() });
        let aim = Mirostat { tau: 0.0, eta: 1.0 };
        let surprised = submit(&PROMPT, Steering { mirostat: Some(aim), ..Steering::default() });
        let (first, beside) = (first.finish(), beside.finish());
        assert_eq!((first.ids, first.logprobs), (plain.ids.clone(), plain.logprobs.clone()));
        assert_eq!((beside.ids, beside.logprobs), (other.ids, other.logprobs));
        let changed = changed.finish();
        changed.end.unwrap();
        assert!(!changed.ids.contains(&plain.ids[0]), "{:?}", changed.ids);
        if top_logprobs > 0 {
            let [told, best] = [&changed.logprobs[0], &plain.logprobs[0]];
            assert_eq!((changed.ids[0], told.logprob, &told.top), (best.top[1].0, best.top[1].1, &best.top));
        }
        // It aims at no surprise at all.
        assert_eq!(surprised.finish().ids, plain.ids);
    }
}

#[test]
fn log_probabilities_are_those_of_the_unchanged_logits() {
    let Some(rig) = Rig::open() else { return };
    let model = model(1, &tinystories());
    let first = |steering| {
        let answer = rig.submit_steered(&model, &PROMPT, 1, 4, steering).finish();
        answer.end.unwrap();
        (answer.ids[0], answer.logprobs[0].clone())
    };
    let (id, plain) = first(Steering::default());
    assert_eq!((id, plain.logprob), plain.top[0]);
    for (wanted, logprob) in &plain.top[1..] {
        let (id, told) = first(biased([(*wanted, 500.0), (id, -3.0)]));
        assert_eq!((id, told.logprob, &told.top), (*wanted, *logprob, &plain.top));
        let without = plain.top.iter().map(|top| (top.0, -500.0)).filter(|(id, _)| id != wanted);
        let (id, told) = first(biased(without));
        assert_eq!((id, told.logprob, &told.top), (*wanted, *logprob, &plain.top));
    }
    let (id, told) = first(regex(&model, "[0-9]+"));
    assert!(text(&model, &[id]).trim().bytes().all(|byte| byte.is_ascii_digit()));
    assert_eq!(told.top, plain.top);
    assert!(told.logprob < plain.top[3].1);
}
