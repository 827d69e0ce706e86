//! The perplexity of a text equals llama.cpp's. `tests/reference/make_perplexity.py` made the kept figures.

use rocmforge_client::Client;
use rocmforge_client::wire::{GenerateRequest, Prompt, TokenizeRequest};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::common;
use crate::rig::Rig;

const MODEL: &str = "smollm2";

/// Largest relative difference. The other engine rounds activations to 8 bits in its own way.
const DIFFERENCE_MAX: f64 = 0.005;

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Log-probabilities of all tokens but the first.
fn logprobs(client: &Client, ids: &[u32]) -> Vec<f64> {
    let request = GenerateRequest { max_tokens: 1, ..GenerateRequest::new(MODEL, Prompt::Ids(ids.to_vec())) };
    let mut generation = client.generate(&request.with_scores(0)).unwrap();
    let mut found = Vec::new();
    while let Some(item) = generation.next_item().unwrap() {
        if item.ids.is_empty() {
            found.extend(item.logprobs.iter().map(|one| f64::from(one.logprob)));
        }
    }
    assert_eq!(found.len(), ids.len() - 1);
    found
}

#[test]
fn the_perplexity_of_a_text_is_llama_cpps() {
    let Some(model) = common::smollm2() else { return };
    let kept: Value = serde_json::from_str(include_str!("../reference/expected/perplexity.json")).unwrap();
    assert_eq!(kept["model_sha256"], digest(&std::fs::read(&model).unwrap()));
    let path = kept["text"].as_str().unwrap();
    let text = std::fs::read_to_string(path).unwrap_or_default();
    if kept["text_sha256"] != digest(text.as_bytes()) {
        common::not_run(&format!("{path} is not here, or another text"));
        return;
    }
    let mut rig = Rig::idle();
    std::os::unix::fs::symlink(model, rig.model(MODEL)).unwrap();
    rig.configure("[device]\nbackend = 'cpu'\n");
    rig.run();
    let client = rig.client();
    let request =
        TokenizeRequest { model: MODEL.into(), text, add_special: true, parse_special: false, ext: vec![] };
    let ids = client.tokenize(&request).unwrap().ids;
    let context = kept["context"].as_u64().unwrap() as usize;
    let (mut sum, mut count) = (0.0, 0);
    let mut found = Vec::new();
    let expected: Vec<f64> = serde_json::from_value(kept["perplexity"].clone()).unwrap();
    // Of each chunk, the second half counts; the first is its context.
    for chunk in ids.chunks_exact(context).take(expected.len()) {
        let second = &logprobs(&client, chunk)[context / 2..];
        sum += second.iter().sum::<f64>();
        count += second.len();
        found.push((-sum / count as f64).exp());
    }
    println!("{found:?}\n{expected:?}");
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found / expected - 1.0).abs() < DIFFERENCE_MAX, "{found} {expected}");
    }
}
