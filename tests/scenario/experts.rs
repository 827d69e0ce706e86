//! A model with experts through daemon and client: only the experts that a token is routed to are loaded.

use std::fs;

use rocmforge_client::wire::{GenerateRequest, Prompt};

use crate::forge;
use crate::rig::{Rig, collect};

#[test]
fn experts_that_no_token_was_sent_to_are_never_loaded() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n[log]\nlevel = 'debug'");
    let (_, forge) = forge::decoders().into_iter().find(|(name, _)| *name == "qwen3moe-yarn").unwrap();
    fs::write(rig.model("moe"), forge.build().bytes).unwrap();
    let client = rig.client();
    let shown = client.show("moe", false).unwrap();
    assert_eq!(shown.experts(), Some("3 of 8 used for each token, each 32 wide"));
    assert_eq!((shown.positions(), shown.ffn), (Some("YaRN by 4 from 64 tokens"), 0));
    let plain = client.show(crate::rig::TINY, false).unwrap();
    assert_eq!((plain.experts(), plain.positions()), (None, None));

    let loaded = || client.status().unwrap().devices[0].tensors_loaded;
    let before = loaded();
    let ask = |ids: &[u32], max_tokens| {
        let prompt = Prompt::Ids(ids.to_vec());
        let request = GenerateRequest { max_tokens, ignore_eog: true, ..GenerateRequest::new("moe", prompt) };
        let mut generation = client.generate(&request).unwrap();
        let answer = collect(&mut generation).unwrap();
        let end = generation.end().unwrap();
        (answer, end.tensors_loaded(), end.tensors_found())
    };
    // Embedding, norm and output. In each of two layers: 2 norms, 4 projections, 2 head norms, the router, and the 3
    // parts of 3 experts for one token.
    let (one, of_one, found) = ask(&[17], 1);
    assert_eq!((loaded() - before, of_one, found), (3 + 2 * (9 + 3 * 3), 3 + 2 * (9 + 3 * 3), 0));
    // The engine knows all handles now, so the same token asks for none.
    assert_eq!(ask(&[17], 1), (one.clone(), 0, 0));
    // Lookups are in the log, each with its tensor and the sequence that it was for.
    let log = rig.log_text();
    let lookups = |what: &str| {
        let of_step = |line: &&str| line.contains("step{model=") && line.contains("sequences=[");
        log.lines().filter(|line| line.contains(what)).filter(of_step).count() as u64
    };
    assert_eq!((lookups("a tensor's load begins"), lookups("a tensor was there")), (of_one, 0), "{log}");
    assert_eq!(loaded() - before, 3 + 2 * (9 + 3 * 3), "the same token loaded other experts");
    let long: Vec<u32> = (0..200).map(|i| (i * 37 + 11) % 256 + 3).collect();
    let (_, of_long, _) = ask(&long, 1);
    assert_eq!(of_long, 2 * 5 * 3);
    assert_eq!(loaded() - before, 3 + 2 * (9 + 8 * 3), "two hundred tokens did not load every expert");
    assert_eq!(ask(&[17], 1).0, one);
    rig.assert_serves();
}
