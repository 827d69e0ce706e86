//! Words of 10,000 random texts, compared with another engine's: `tests/reference/make_words.py` made the kept hashes.

use super::PreTokenizer;
use crate::model::tokenizer::random_texts;

#[derive(serde::Deserialize)]
struct Kept {
    alphabet: Vec<String>,
    /// By name of a pre-tokeniser: a hash for every ten texts.
    hashes: std::collections::BTreeMap<String, String>,
}

#[test]
fn words_of_random_texts_are_those_of_another_engine() {
    let kept: Kept =
        serde_json::from_str(include_str!("../../../../tests/reference/expected/words.json")).unwrap();
    assert_eq!(kept.hashes.len(), 3);
    for (name, hashes) in &kept.hashes {
        let split = PreTokenizer::named(Some(name)).unwrap();
        random_texts::check(&kept.alphabet, hashes, name, |text| {
            let mut lengths = Vec::new();
            split.words(text, &mut |word| lengths.push(word.len() as u32));
            lengths.push(0);
            lengths
        });
    }
}
