//! Random numbers that a seed repeats.

/// SplitMix64 (Steele, Lea, Flood 2014). Good for lengths, times and token ids; not for secrets.
#[derive(Clone, Debug)]
pub struct Random(u64);

/// The purpose of a sequence of random numbers. Sequences for different purposes do not depend on each other.
#[derive(Clone, Copy, Debug)]
pub enum Purpose {
    /// Times of arrival.
    Arrivals,
    /// Lengths of one request's prompt and answer.
    Lengths,
    /// Tokens that all prompts begin with.
    SharedPrefix,
    /// Tokens of one request's prompt.
    Prompt,
}

impl Random {
    /// The sequence of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The sequence for a purpose, and for the request of this number if the purpose has one for each request.
    pub fn of(seed: u64, purpose: Purpose, number: u64) -> Self {
        let mixed = [purpose as u64, number].into_iter().fold(seed, |mixed, part| {
            let mut random = Self(mixed ^ part.wrapping_mul(0xd6e8_feb8_6659_fd93));
            random.next()
        });
        Self::new(mixed)
    }

    /// 64 random bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; 0 if that is 0. Some numbers come more often than others by `bound` in 2^64.
    pub fn below(&mut self, bound: u64) -> u64 {
        let product = u128::from(self.next()) * u128::from(bound);
        (product >> 64) as u64
    }

    /// A number in [0, 1): 53 bits.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Time until the next event of a Poisson process with one event per unit of time on average.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    /// A number with mean 0 and standard deviation 1, by the method of Box and Muller.
    pub fn normal(&mut self) -> f64 {
        let radius = (2.0 * self.exponential()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_published_generator() {
        let mut random = Random::new(1_234_567);
        let published = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!([(); 5].map(|()| random.next()), published);
    }

    #[test]
    fn purposes_and_requests_have_sequences_of_their_own() {
        let first = |seed, purpose, number| Random::of(seed, purpose, number).next();
        let mut seen = vec![];
        for seed in [0, 1] {
            for purpose in [Purpose::Arrivals, Purpose::Lengths, Purpose::SharedPrefix, Purpose::Prompt] {
                seen.extend((0..100).map(|number| first(seed, purpose, number)));
            }
        }
        let all = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), all);
        assert_eq!(first(7, Purpose::Prompt, 3), first(7, Purpose::Prompt, 3));
    }

    #[test]
    fn draws_have_the_moments_of_their_distributions() {
        const COUNT: usize = 100_000;
        let mut random = Random::new(5);
        let moments = |draws: Vec<f64>| {
            let mean = draws.iter().sum::<f64>() / COUNT as f64;
            let variance = draws.iter().map(|draw| (draw - mean).powi(2)).sum::<f64>() / COUNT as f64;
            (mean, variance)
        };
        // Six standard errors of a mean are 0.02 here.
        let close = |(mean, variance): (f64, f64), wanted: (f64, f64)| {
            (mean - wanted.0).abs() < 0.02 && (variance - wanted.1).abs() < 0.06
        };
        let normal = moments((0..COUNT).map(|_| random.normal()).collect());
        assert!(close(normal, (0.0, 1.0)), "{normal:?}");
        let exponential = moments((0..COUNT).map(|_| random.exponential()).collect());
        assert!(close(exponential, (1.0, 1.0)), "{exponential:?}");
        let uniform = moments((0..COUNT).map(|_| random.below(3) as f64).collect());
        assert!(close(uniform, (1.0, 2.0 / 3.0)), "{uniform:?}");
        assert_eq!(random.below(0), 0);
    }
}
