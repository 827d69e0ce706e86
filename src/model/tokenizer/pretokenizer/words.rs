//! Words of 10,000 random texts, compared with another engine's: `tests/reference/make_words.py` made the kept hashes.

use super::PreTokenizer;

const TEXTS: usize = 10_000;
const TOGETHER: usize = 10;
const PIECES: u64 = 24;
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

#[derive(serde::Deserialize)]
struct Kept {
    alphabet: Vec<String>,
    /// By name of a pre-tokeniser: a hash for every ten texts.
    hashes: std::collections::BTreeMap<String, String>,
}

/// The texts of the generator in `make_words.py`.
fn texts(alphabet: &[String]) -> Vec<String> {
    let mut state = SEED;
    let mut draw = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 32
    };
    let mut text = || {
        let pieces = 1 + draw() % PIECES;
        (0..pieces).map(|_| alphabet[draw() as usize % alphabet.len()].as_str()).collect()
    };
    (0..TEXTS).map(|_| text()).collect()
}

/// 32-bit FNV-1a, continued from `hash`.
fn fnv(hash: u32, number: usize) -> u32 {
    (number as u32)
        .to_le_bytes()
        .iter()
        .fold(hash, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

#[test]
fn words_of_random_texts_are_those_of_another_engine() {
    let kept: Kept =
        serde_json::from_str(include_str!("../../../../tests/reference/expected/words.json")).unwrap();
    let texts = texts(&kept.alphabet);
    assert_eq!(kept.hashes.len(), 3);
    for (name, hashes) in &kept.hashes {
        let hashes: Vec<&str> = hashes.split(' ').collect();
        assert_eq!(hashes.len(), TEXTS / TOGETHER);
        let split = PreTokenizer::named(Some(name)).unwrap();
        for (texts, want) in texts.chunks(TOGETHER).zip(hashes) {
            let mut found = 0x811c_9dc5;
            for text in texts {
                split.words(text, &mut |word| found = fnv(found, word.len()));
                found = fnv(found, 0);
            }
            assert_eq!(format!("{found:08x}"), want, "{name}: one of {texts:?}");
        }
    }
}
