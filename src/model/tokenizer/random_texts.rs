//! 10,000 random texts, and hashes of what was made of them: for tests against other engines. `tests/reference/make_words.py` and the
//! other scripts there have the same generator.

/// Number of texts.
const TEXTS: usize = 10_000;
/// Texts of one hash.
const TOGETHER: usize = 10;
/// Most pieces of the alphabet in a text.
const PIECES: u64 = 24;
/// Start of the generator.
pub const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// The next state of a generator.
pub fn next(state: u64) -> u64 {
    let state = state ^ state << 13;
    let state = state ^ state >> 7;
    state ^ state << 17
}

fn texts(alphabet: &[String]) -> Vec<String> {
    let mut state = SEED;
    let mut draw = move || {
        state = next(state);
        state >> 32
    };
    let mut text = || {
        let pieces = 1 + draw() % PIECES;
        (0..pieces).map(|_| alphabet[draw() as usize % alphabet.len()].as_str()).collect()
    };
    (0..TEXTS).map(|_| text()).collect()
}

/// 32-bit FNV-1a, continued from `hash`.
fn fnv(hash: u32, number: u32) -> u32 {
    let bytes = number.to_le_bytes();
    bytes.iter().fold(hash, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// Compares the numbers that `numbers` makes of each text with the kept hashes, one of ten texts each. Panics with the texts of the
/// first that differs.
pub fn check(alphabet: &[String], hashes: &str, what: &str, mut numbers: impl FnMut(&str) -> Vec<u32>) {
    let hashes: Vec<&str> = hashes.split(' ').collect();
    assert_eq!(hashes.len(), TEXTS / TOGETHER);
    for (texts, want) in texts(alphabet).chunks(TOGETHER).zip(hashes) {
        let found = texts.iter().flat_map(|text| numbers(text)).fold(0x811c_9dc5, fnv);
        assert_eq!(format!("{found:08x}"), want, "{what}: one of {texts:?}");
    }
}
