//! Prompts of random token ids.

use super::link::Setup;
use super::random::{Purpose, Random};

/// Makes the prompts of a benchmark. A prompt depends on the seed and on the request's number alone, so it does not
/// matter which client asks it.
#[derive(Debug)]
pub struct Prompts {
    seed: u64,
    /// Ids that prompts may contain.
    allowed: Vec<u32>,
    shared: Vec<u32>,
}

impl Prompts {
    /// Draws the shared tokens.
    pub fn new(setup: &Setup) -> Self {
        let allowed = (0..setup.vocabulary).filter(|id| !setup.left_out.contains(id)).collect();
        let mut prompts = Self { seed: setup.seed, allowed, shared: Vec::new() };
        let mut random = Random::of(setup.seed, Purpose::SharedPrefix, 0);
        prompts.shared = (0..setup.shared_tokens).map(|_| prompts.id(random.next())).collect();
        prompts
    }

    /// The shared tokens and this many of the request's own. The first of these is another one for each request, until
    /// all ids were used. So no two prompts share more than the shared tokens.
    pub fn ids(&self, number: u64, own_tokens: u32) -> Vec<u32> {
        let mut random = Random::of(self.seed, Purpose::Prompt, number);
        let from = Random::of(self.seed, Purpose::Prompt, u64::MAX).next() >> 1;
        let first = from.wrapping_add(number) % (self.allowed.len() as u64).max(1);
        let first = self.allowed.get(first as usize).copied().unwrap_or(0);
        let others = (1..own_tokens).map(|_| self.id(random.next()));
        self.shared.iter().copied().chain([first]).chain(others).collect()
    }

    /// The id that random bits choose; 0 if there is none.
    fn id(&self, bits: u64) -> u32 {
        let at = (u128::from(bits) * self.allowed.len() as u128) >> 64;
        self.allowed.get(at as usize).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup(seed: u64) -> Setup {
        Setup {
            model: "m".into(),
            seed,
            shared_tokens: 5,
            vocabulary: 300,
            left_out: vec![2, 299],
            schema: None,
        }
    }

    #[test]
    fn prompts_share_the_prefix_and_nothing_more() {
        let prompts = Prompts::new(&setup(1));
        let all: Vec<Vec<u32>> = (0..298).map(|number| prompts.ids(number, 7)).collect();
        assert!(all.iter().all(|ids| ids.len() == 12 && ids[..5] == all[0][..5]));
        let mut firsts: Vec<u32> = all.iter().map(|ids| ids[5]).collect();
        firsts.sort_unstable();
        firsts.dedup();
        assert_eq!(firsts.len(), 298, "each request has a first token of its own");
        assert!(all.iter().flatten().all(|id| *id < 300 && ![2, 299].contains(id)));
    }

    #[test]
    fn prompts_repeat_by_seed_and_number() {
        let (one, same, other) = (Prompts::new(&setup(1)), Prompts::new(&setup(1)), Prompts::new(&setup(2)));
        assert_eq!(one.ids(9, 40), same.ids(9, 40));
        assert_ne!(one.ids(9, 40), other.ids(9, 40));
        assert_ne!(one.shared, other.shared);
        assert_eq!(one.ids(9, 1).len(), 6);
    }

    #[test]
    fn a_model_without_usable_tokens_gets_ids_that_the_daemon_refuses_or_not() {
        let none = Setup { vocabulary: 0, ..setup(1) };
        assert_eq!(Prompts::new(&none).ids(3, 2), [0; 7]);
    }
}
