//! Numbers that are unique and tell nobody how many there are.
//!
//! Users see the numbers of their own requests and models. Numbers that count would tell how many others make. These are
//! counted within and shown permuted: a Feistel network of four rounds maps each block of 2^32 counts onto itself. Its key
//! is drawn at random when the daemon starts.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

const ROUNDS: u8 = 4;

/// Gives out unique numbers, none of them 0. Any thread may ask.
#[derive(Debug, Default)]
pub struct Numbers {
    given: AtomicU64,
    key: RandomState,
}

impl Numbers {
    /// A number that none before equals. The first 2^32 have at most ten digits.
    pub fn draw(&self) -> u64 {
        loop {
            let count = self.given.fetch_add(1, Ordering::Relaxed);
            let number = count >> 32 << 32 | u64::from(self.permute(count as u32));
            if number != 0 {
                return number;
            }
        }
    }

    /// One to one on 32 bits.
    fn permute(&self, count: u32) -> u32 {
        let (mut left, mut right) = ((count >> 16) as u16, count as u16);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ self.key.hash_one((round, right)) as u16);
        }
        u32::from(left) << 16 | u32::from(right)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn numbers_are_unique_and_do_not_follow_each_other() {
        let numbers = Numbers::default();
        let drawn: Vec<u64> = (0..100_000).map(|_| numbers.draw()).collect();
        assert_eq!(drawn.iter().collect::<BTreeSet<_>>().len(), drawn.len());
        assert!(drawn.iter().all(|number| (1..1 << 32).contains(number)));
        // Of 100,000 random pairs, one in 2^31 / 1,000 is so near: 0.05 are expected, 10 never come by chance.
        let near = drawn.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) < 1000).count();
        assert!(near < 10, "{near} numbers are near the one before");
        let other = Numbers::default();
        assert_ne!(
            (0..8).map(|_| other.draw()).collect::<Vec<_>>(),
            drawn[..8],
            "each key gives an order of its own"
        );
    }

    #[test]
    fn numbers_past_the_first_block_differ_from_it() {
        let numbers = Numbers { given: AtomicU64::new((1 << 32) - 2), key: RandomState::new() };
        let drawn: BTreeSet<u64> = (0..4).map(|_| numbers.draw()).collect();
        assert_eq!((drawn.len(), drawn.range(1 << 32..).count()), (4, 2));
    }
}
