//! Text, stop texts and end-of-generation tokens.

use super::*;

/// The bytes of the fake device's answer.
fn bytes_of(rig: &Rig, ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|&id| rig.model.tokenizer.token_bytes(id, false).unwrap().to_vec()).collect()
}

#[test]
fn the_text_is_that_of_the_tokens() {
    let rig = Rig::new(EngineOptions::default());
    let answer = rig.ask(&prompt(1, 10), 200).finish();
    assert_eq!(answer.text, String::from_utf8_lossy(&bytes_of(&rig, &answer.ids)));
    assert!(answer.text.len() > 200);
}

#[test]
fn a_stop_text_ends_the_answer() {
    let rig = Rig::new(EngineOptions::default());
    let whole = rig.ask(&prompt(1, 10), 60).finish();
    let at = whole.text.char_indices().nth(40).unwrap().0;
    let stop: String = whole.text[at..].chars().take(7).collect();
    let first = whole.text.find(&stop).unwrap();
    let (mut job, asked) = rig.job(&prompt(1, 10), 60);
    job.stop = vec!["never in there".into(), stop];
    rig.handle().submit(job).unwrap();
    let answer = asked.finish();
    assert_eq!((answer.text.as_str(), answer.outcome().reason), (&whole.text[..first], StopReason::StopText));
    assert!(whole.ids.starts_with(&answer.ids) && answer.ids.len() < 60, "the stop's tokens are reported");
    rig.assert_empty();
}

#[test]
fn an_end_of_generation_token_is_reported_without_text() {
    let rig = Rig::new(EngineOptions::default());
    let eog = rig.model.tokenizer.end_of_generation()[0];
    // The fake device hashes its tokens, so some prompt leads to the end-of-generation token soon.
    let (start, at) = (0..200)
        .find_map(|seed| {
            let ids = expected(&prompt(seed, 10), 60);
            ids.iter().position(|&id| id == eog).filter(|&at| at > 0).map(|at| (seed, at))
        })
        .unwrap();
    let (mut job, asked) = rig.job(&prompt(start, 10), 60);
    job.ignore_eog = false;
    rig.handle().submit(job).unwrap();
    let answer = asked.finish();
    assert_eq!(answer.outcome().reason, StopReason::EndOfGeneration);
    assert_eq!(answer.ids, expected(&prompt(start, 10), at + 1));
    assert_eq!(answer.text, String::from_utf8_lossy(&bytes_of(&rig, &answer.ids[..at])));
    assert_eq!(rig.ask(&prompt(start, 10), 60).finish().ids.len(), 60, "ignored with ignore_eog");
}
