//! Bounds what the log says about each user: a user that is refused a thousand times a second fills no journal.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The time in which the lines about a uid are counted.
const LOG_TIME: Duration = Duration::from_secs(10);

/// Most uids that are counted one by one; further ones are counted together.
const UIDS_MAX: usize = 64;

/// Counts lines of the log about users, so that no user can fill it.
#[derive(Debug)]
pub struct LoggedUids {
    /// Most lines about a uid in [`LOG_TIME`].
    lines_max: u32,
    /// Uids with lines in the last [`LOG_TIME`].
    uids: HashMap<u32, Told>,
    /// All further uids together.
    others: Option<Told>,
    /// Lines that were left out, of uids that are forgotten.
    untold: u64,
}

#[derive(Clone, Copy, Debug)]
struct Told {
    /// The first line of the time.
    at: Instant,
    lines: u32,
    untold: u64,
}

/// Lines that were left out since the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Untold {
    /// Of the same uid.
    pub of_uid: u64,
    /// Of uids that are not counted one by one.
    pub of_others: u64,
}

impl LoggedUids {
    /// At most `lines_max` lines about a uid in ten seconds.
    pub fn new(lines_max: u32) -> Self {
        Self { lines_max, uids: HashMap::new(), others: None, untold: 0 }
    }

    /// Counts a line about that uid; `None` if it must be left out.
    pub fn tell(&mut self, uid: u32, now: Instant) -> Option<Untold> {
        let recent = |told: &Told| now.saturating_duration_since(told.at) < LOG_TIME;
        if !self.uids.contains_key(&uid) && self.uids.len() >= UIDS_MAX {
            let old = self.uids.extract_if(|_, told| !recent(told));
            let untold: u64 = old.map(|(_, told)| told.untold).sum();
            self.untold = self.untold.saturating_add(untold);
        }
        let known = if self.uids.len() < UIDS_MAX || self.uids.contains_key(&uid) {
            self.uids.get_mut(&uid)
        } else {
            self.others.as_mut()
        };
        if let Some(told) = known
            && recent(told)
        {
            if told.lines < self.lines_max {
                told.lines += 1;
                return Some(Untold { of_uid: 0, of_others: 0 });
            }
            told.untold = told.untold.saturating_add(1);
            return None;
        }
        let new = Told { at: now, lines: 1, untold: 0 };
        let of_uid = if self.uids.len() < UIDS_MAX || self.uids.contains_key(&uid) {
            self.uids.insert(uid, new).map_or(0, |told| told.untold)
        } else {
            let untold = self.others.replace(new).map_or(0, |told| told.untold);
            self.untold = self.untold.saturating_add(untold);
            0
        };
        Some(Untold { of_uid, of_others: std::mem::take(&mut self.untold) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_told_once_in_ten_seconds_and_all_are_counted() {
        let (mut refused, now) = (LoggedUids::new(1), Instant::now());
        let told = |of_uid, of_others| Some(Untold { of_uid, of_others });
        assert_eq!(refused.tell(1, now), told(0, 0));
        for _ in 0..1000 {
            assert_eq!(refused.tell(1, now), None);
        }
        assert_eq!(refused.tell(1, now + LOG_TIME), told(1000, 0));
        let lines = (0..5000).filter(|uid| refused.tell(*uid, now + LOG_TIME).is_some()).count();
        assert_eq!((lines, refused.uids.len()), (UIDS_MAX, UIDS_MAX), "63 new uids, and the others once");
        assert_eq!(refused.tell(9999, now + 2 * LOG_TIME), told(0, 1));
    }

    #[test]
    fn a_few_lines_are_told_before_the_rest_is_counted() {
        let (mut logged, now) = (LoggedUids::new(3), Instant::now());
        let lines: Vec<_> = (0..10).map(|_| logged.tell(1, now).is_some()).collect();
        assert_eq!(lines, [true, true, true, false, false, false, false, false, false, false]);
        assert_eq!(logged.tell(1, now + LOG_TIME), Some(Untold { of_uid: 7, of_others: 0 }));
    }
}
