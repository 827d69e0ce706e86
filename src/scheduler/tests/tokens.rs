//! The tokens that the fake device draws.

/// FNV-1a over tokens and seed. With a seed that [`REPEATS`], seven of eight tokens are those of [`PERIOD`] before.
pub fn next_token(tokens: &[u32], seed: u64, vocab: usize) -> u32 {
    let words = tokens.iter().map(|&t| u64::from(t)).chain([seed]);
    let hash = words.fold(0xcbf2_9ce4_8422_2325, |h: u64, w| (h ^ w).wrapping_mul(0x100_0000_01b3));
    match tokens.len().checked_sub(PERIOD) {
        Some(before) if seed & REPEATS > 0 && (hash >> 50) % 8 > 0 => tokens[before],
        _ => ((hash >> 20) % vocab as u64) as u32,
    }
}

/// Bit of the seeds of texts that repeat themselves.
pub const REPEATS: u64 = 1 << 40;

/// Tokens after which such a text repeats itself.
pub const PERIOD: usize = 12;

/// The logits of a sequence with this seed are not finite.
pub const BROKEN_SEED: u64 = 0xbad;

/// As [`next_token`], but for one in four another one, as a smaller model draws.
pub fn wrong_token(tokens: &[u32], seed: u64, vocab: usize) -> u32 {
    let id = next_token(tokens, seed, vocab);
    if (id + tokens.len() as u32).is_multiple_of(4) { (id + 1) % vocab as u32 } else { id }
}
