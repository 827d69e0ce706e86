//! Exact percentiles of collected samples.

use serde::Serialize;

/// The largest of `permille` thousandths of the sorted values, by the nearest-rank method. That is the smallest value
/// which at least so many thousandths of all values do not exceed. `None` without values.
pub fn nearest_rank(sorted: &[u64], permille: u64) -> Option<u64> {
    let count = sorted.len() as u128;
    let rank = (u128::from(permille.min(1000)) * count).div_ceil(1000).max(1);
    sorted.get(usize::try_from(rank - 1).ok()?).copied()
}

/// Percentiles of times, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Percentiles {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Percentiles {
    /// Of sorted times in microseconds; `None` without times.
    pub fn of(sorted_us: &[u64]) -> Option<Self> {
        let at = |permille| Some(nearest_rank(sorted_us, permille)? as f64 / 1e3);
        Some(Self { p50: at(500)?, p90: at(900)?, p99: at(990)?, max: at(1000)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::bench::random::Random;

    /// The definition, word by word: the smallest value that enough values do not exceed.
    fn by_counting(values: &[u64], permille: u64) -> Option<u64> {
        let enough = |value: u64| {
            let below = values.iter().filter(|other| **other <= value).count() as u64;
            below * 1000 >= permille * values.len() as u64
        };
        values.iter().copied().filter(|value| enough(*value)).min()
    }

    #[test]
    fn ranks_are_those_of_the_definition() {
        let mut random = Random::new(11);
        for _ in 0..300 {
            let count = random.below(40);
            // Few different values, so that many are equal.
            let range = 1 + random.below(30);
            let values: Vec<u64> = (0..count).map(|_| random.below(range)).collect();
            let mut sorted = values.clone();
            sorted.sort_unstable();
            for permille in [0, 1, 250, 500, 501, 900, 990, 999, 1000, random.below(1001)] {
                assert_eq!(
                    nearest_rank(&sorted, permille),
                    by_counting(&values, permille),
                    "{permille} of {sorted:?}"
                );
            }
        }
    }

    #[test]
    fn percentiles_of_known_values() {
        let hundred: Vec<u64> = (1..=100).map(|value| value * 1000).collect();
        let expected = Percentiles { p50: 50.0, p90: 90.0, p99: 99.0, max: 100.0 };
        assert_eq!(Percentiles::of(&hundred), Some(expected));
        assert_eq!(Percentiles::of(&[]), None);
        assert_eq!(nearest_rank(&[7], 1), Some(7));
    }
}
