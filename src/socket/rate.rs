//! How fast each user may connect, so that none of them fills the queue of the listening socket.
//!
//! A client that connects and leaves at once costs the daemon ten times as much as a connection that it closes unserved.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// A user may connect once in this time for ever: 500 times a second.
const EACH: Duration = Duration::from_millis(2);
/// A quiet user saves this much time: 1,000 connections at once.
const SAVED: Duration = Duration::from_secs(2);
/// Users that are remembered; of more, those that have saved all they may are forgotten.
const USERS_KEPT: usize = 64;

/// When each user has paid for all of its connections.
#[derive(Debug, Default)]
pub(super) struct Rates(HashMap<u32, Instant>);

impl Rates {
    /// Counts a connection of that user. False if it connects too fast; then nothing is counted.
    pub fn may_connect(&mut self, uid: u32, now: Instant) -> bool {
        let least = now.checked_sub(SAVED).unwrap_or(now);
        if self.0.len() >= USERS_KEPT {
            self.0.retain(|_, paid| *paid > least);
        }
        let paid = self.0.entry(uid).or_insert(least);
        *paid = (*paid).max(least);
        let may = *paid + EACH <= now;
        if may {
            *paid += EACH;
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_that_connects_too_fast_waits_and_others_do_not() {
        let (mut rates, begun) = (Rates::default(), Instant::now());
        let connect = |rates: &mut Rates, uid, now| (0..).take_while(|_| rates.may_connect(uid, now)).count();
        assert_eq!(connect(&mut rates, 1, begun), 1000);
        assert!(!rates.may_connect(1, begun + EACH / 2) && rates.may_connect(2, begun));
        assert_eq!(connect(&mut rates, 1, begun + 10 * EACH), 10, "what was refused costs nothing");
        assert_eq!(connect(&mut rates, 1, begun + 10 * SAVED), 1000);
    }

    #[test]
    fn quiet_users_are_forgotten() {
        let (mut rates, begun) = (Rates::default(), Instant::now());
        for uid in 0..2 * USERS_KEPT as u32 {
            rates.may_connect(uid, begun);
        }
        rates.may_connect(7, begun + 2 * SAVED);
        assert_eq!(rates.0.len(), 1);
    }
}
