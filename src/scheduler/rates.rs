//! Device time a second of each user, over the recent past, for administrators.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Older time counts less: after this long, 1/e of it is left.
const PAST: Duration = Duration::from_secs(10);
/// Users with less than this in microseconds a second are forgotten.
const LEAST: f64 = 1.0;

/// The rates of all users that had device time not long ago.
#[derive(Debug, Default)]
pub(super) struct Rates(BTreeMap<u32, Rate>);

/// Microseconds a second at that time.
#[derive(Clone, Copy, Debug)]
struct Rate {
    value: f64,
    at: Instant,
}

impl Rate {
    fn at(self, now: Instant) -> f64 {
        let age = now.saturating_duration_since(self.at).as_secs_f64();
        self.value * (-age / PAST.as_secs_f64()).exp()
    }
}

impl Rates {
    /// Counts device time of a user.
    pub fn add(&mut self, uid: u32, time: Duration, now: Instant) {
        let rate = self.0.entry(uid).or_insert(Rate { value: 0.0, at: now });
        *rate = Rate { value: rate.at(now) + time.as_secs_f64() * 1e6 / PAST.as_secs_f64(), at: now };
    }

    /// Each user's device time in microseconds a second.
    pub fn at(&mut self, now: Instant) -> BTreeMap<u32, u64> {
        self.0.retain(|_, rate| rate.at(now) >= LEAST);
        self.0.iter().map(|(uid, rate)| (*uid, rate.at(now).round() as u64)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_rate_is_that_of_about_the_last_ten_seconds() {
        let (mut rates, begun) = (Rates::default(), Instant::now());
        // A minute in which user 1 has three quarters of the device, and user 2 the rest.
        for step in 0..6000 {
            let now = begun + step * 10 * MS;
            rates.add(1 + u32::from(step % 4 == 0), 10 * MS, now);
        }
        let now = begun + 60_000 * MS;
        let of = rates.at(now);
        assert!((740_000..760_000).contains(&of[&1]) && (240_000..260_000).contains(&of[&2]), "{of:?}");
        let later = rates.at(now + PAST);
        assert!((270_000..280_000).contains(&later[&1]), "1/e of it is left: {later:?}");
        assert!(rates.at(now + 20 * PAST).is_empty() && rates.0.is_empty(), "forgotten");
    }
}
