//! When requests arrive.

use std::fmt;
use std::str::FromStr;

use super::random::{Purpose, Random};

/// Most requests a second, and most in one burst.
const RATE_MAX: f64 = 1e6;
const BURST_MAX: u32 = 1_000_000;
/// Longest time between bursts: a day.
const PERIOD_MAX_S: f64 = 86_400.0;

/// How requests arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// `closed`: each client asks again when it has its answer.
    Closed,
    /// `poisson:RATE`: independent of each other, so many a second on average.
    Poisson { rate: f64 },
    /// `bursts:N/SECONDS`: N at once, again after each period.
    Bursts { requests: u32, period_s: f64 },
}

/// Why a text says no arrivals.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum ArrivalsError {
    #[error("give closed, poisson:RATE or bursts:N/SECONDS")]
    Form,
    #[error("{0:?} is no rate: give requests a second, above 0 and at most {RATE_MAX}")]
    Rate(String),
    #[error("{0:?} is no number of requests: give 1 to {BURST_MAX}")]
    Requests(String),
    #[error("{0:?} is no period: give seconds, above 0 and at most {PERIOD_MAX_S}")]
    Period(String),
}

impl Arrivals {
    /// Times of arrival in microseconds from the beginning; `None` for each request of a closed loop.
    pub fn times(self, seed: u64) -> Times {
        Times { arrivals: self, random: Random::of(seed, Purpose::Arrivals, 0), count: 0, at_s: 0.0 }
    }
}

/// An endless iterator over times of arrival.
#[derive(Debug)]
pub struct Times {
    arrivals: Arrivals,
    random: Random,
    count: u64,
    at_s: f64,
}

impl Times {
    /// The next request's time.
    pub fn next(&mut self) -> Option<u64> {
        let number = self.count;
        self.count += 1;
        match self.arrivals {
            Arrivals::Closed => return None,
            Arrivals::Poisson { rate } => self.at_s += self.random.exponential() / rate,
            Arrivals::Bursts { requests, period_s } => {
                self.at_s = (number / u64::from(requests)) as f64 * period_s;
            }
        }
        Some((self.at_s * 1e6) as u64)
    }
}

impl FromStr for Arrivals {
    type Err = ArrivalsError;

    fn from_str(text: &str) -> Result<Self, ArrivalsError> {
        if text == "closed" {
            return Ok(Self::Closed);
        }
        if let Some(rate) = text.strip_prefix("poisson:") {
            let parsed = positive(rate, RATE_MAX).ok_or_else(|| ArrivalsError::Rate(rate.to_owned()))?;
            return Ok(Self::Poisson { rate: parsed });
        }
        let burst = text.strip_prefix("bursts:").and_then(|burst| burst.split_once('/'));
        let (requests, period) = burst.ok_or(ArrivalsError::Form)?;
        let count = requests.parse().ok().filter(|count| (1..=BURST_MAX).contains(count));
        Ok(Self::Bursts {
            requests: count.ok_or_else(|| ArrivalsError::Requests(requests.to_owned()))?,
            period_s: positive(period, PERIOD_MAX_S)
                .ok_or_else(|| ArrivalsError::Period(period.to_owned()))?,
        })
    }
}

/// A number above 0 and at most `max`; not NaN.
fn positive(text: &str, max: f64) -> Option<f64> {
    text.parse().ok().filter(|number: &f64| *number > 0.0 && *number <= max)
}

impl fmt::Display for Arrivals {
    /// The text that parses to it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("closed"),
            Self::Poisson { rate } => write!(f, "poisson:{rate}"),
            Self::Bursts { requests, period_s } => write!(f, "bursts:{requests}/{period_s}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(text: &str, count: usize) -> Vec<Option<u64>> {
        let arrivals: Arrivals = text.parse().unwrap();
        assert_eq!(arrivals.to_string(), text);
        let mut times = arrivals.times(9);
        (0..count).map(|_| times.next()).collect()
    }

    #[test]
    fn bursts_come_together_and_closed_loops_have_no_times() {
        assert_eq!(times("closed", 2), [None, None]);
        let at = |us| Some(us);
        assert_eq!(times("bursts:2/0.5", 5), [at(0), at(0), at(500_000), at(500_000), at(1_000_000)]);
    }

    #[test]
    fn poisson_arrivals_have_the_rate_and_the_spread() {
        const COUNT: usize = 20_000;
        let at: Vec<u64> = times("poisson:50", COUNT).into_iter().map(Option::unwrap).collect();
        assert!(at.windows(2).all(|two| two[0] <= two[1]));
        let seconds = at[COUNT - 1] as f64 / 1e6;
        assert!((seconds - 400.0).abs() < 17.0, "six standard errors: {seconds}");
        // Of exponential gaps, 1 in e is longer than the mean of 20 ms.
        let longer = at.windows(2).filter(|two| two[1] - two[0] > 20_000).count() as f64 / COUNT as f64;
        assert!((longer - (-1.0f64).exp()).abs() < 0.02, "{longer}");
        assert_eq!(times("poisson:50", 5), times("poisson:50", 5));
    }

    #[test]
    fn errors_name_the_part_that_is_wrong() {
        let error = |text: &str| text.parse::<Arrivals>().unwrap_err();
        for text in ["", "open", "poisson", "bursts:3", "bursts"] {
            assert_eq!(error(text), ArrivalsError::Form, "{text}");
        }
        assert_eq!(error("poisson:0"), ArrivalsError::Rate("0".into()));
        assert_eq!(error("poisson:NaN"), ArrivalsError::Rate("NaN".into()));
        assert_eq!(error("bursts:0/1"), ArrivalsError::Requests("0".into()));
        assert_eq!(error("bursts:1/inf"), ArrivalsError::Period("inf".into()));
    }
}
