//! Limits of users: those that hold for every user, and those that an administrator set for single users.
//!
//! A limit of a single user takes the place of the one for every user. The configuration sets some; requests change them
//! at run time, until the daemon stops or a reload reads the configuration again. Earlier holdings of a user stay its
//! own: a lower limit refuses only what comes next.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::lock::{Mutex, Rank};

/// A user's share of the device's time, unless an administrator set another one.
pub const SHARE: u32 = 100;

/// The greatest uid: the kernel keeps the next number for no user.
pub const UID_MAX: u32 = u32::MAX - 1;

/// Most users with limits of their own: all of them fit one answer of the smallest frame.
pub const USERS_MAX: usize = 1024;

/// The kinds of limits: key, least value, greatest value. Without a connection, a user could not even be told why; and
/// a share of 0 would let requests wait for ever.
pub const RANGES: [(&str, u32, u32); 4] =
    [("requests", 0, 1 << 20), ("connections", 1, 60_000), ("passed_models", 0, 4096), ("share", 1, 1000)];

/// Limits that hold for every user without one of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfEveryUser {
    /// Most token requests, loads to a device and subscriptions at once.
    pub requests: u32,
    /// Most open connections.
    pub connections: u32,
    /// Most model files passed by descriptor at a time.
    pub passed_models: u32,
}

impl Default for OfEveryUser {
    /// No limits.
    fn default() -> Self {
        Self { requests: u32::MAX, connections: u32::MAX, passed_models: u32::MAX }
    }
}

/// Limits of one user; `None` where the one for every user holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OfOneUser {
    /// As [`OfEveryUser::requests`].
    pub requests: Option<u32>,
    /// As [`OfEveryUser::connections`].
    pub connections: Option<u32>,
    /// As [`OfEveryUser::passed_models`].
    pub passed_models: Option<u32>,
    /// Share of the device's time, beside [`SHARE`] for others.
    pub share: Option<u32>,
}

/// A value outside its range, by [`RANGES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key} = {value} is not in {min}..={max}")]
pub struct OutOfRange {
    /// Which limit.
    pub key: &'static str,
    /// The value found.
    pub value: u32,
    /// Least value.
    pub min: u32,
    /// Greatest value.
    pub max: u32,
}

impl OfOneUser {
    fn values(&self) -> [Option<u32>; 4] {
        [self.requests, self.connections, self.passed_models, self.share]
    }

    /// Refuses values outside [`RANGES`].
    ///
    /// # Errors
    /// [`OutOfRange`].
    pub fn check(&self) -> Result<(), OutOfRange> {
        for ((key, min, max), value) in RANGES.into_iter().zip(self.values()) {
            if let Some(value) = value.filter(|value| !(min..=max).contains(value)) {
                return Err(OutOfRange { key, value, min, max });
            }
        }
        Ok(())
    }

    /// These limits, and those of `below` where there are none.
    fn over(self, below: Self) -> Self {
        Self {
            requests: self.requests.or(below.requests),
            connections: self.connections.or(below.connections),
            passed_models: self.passed_models.or(below.passed_models),
            share: self.share.or(below.share),
        }
    }
}

/// The origin of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It holds for every user.
    EveryUser,
    /// The configuration sets it for this user.
    Configuration,
    /// A request set it for this user at run time.
    Request,
}

/// A limit in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The value.
    pub value: u32,
    /// Its origin.
    pub origin: Origin,
}

impl Limit {
    /// True if an administrator set it for this user alone.
    pub fn is_own(self) -> bool {
        self.origin != Origin::EveryUser
    }

    /// The limit as words at the end of a refusal.
    pub fn words(self, uid: u32) -> String {
        match self.origin {
            Origin::EveryUser => format!("the limit is {}", self.value),
            _ => format!("an administrator set the limit of uid {uid} to {}", self.value),
        }
    }
}

/// All limits of one user that are in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InForce {
    /// As [`OfEveryUser::requests`].
    pub requests: Limit,
    /// As [`OfEveryUser::connections`].
    pub connections: Limit,
    /// As [`OfEveryUser::passed_models`].
    pub passed_models: Limit,
    /// As [`OfOneUser::share`].
    pub share: Limit,
}

/// The limits of all users.
#[derive(Debug)]
pub struct UserLimits {
    tables: Mutex<Tables>,
    /// Number of changes.
    version: AtomicU64,
}

#[derive(Debug, Default)]
struct Tables {
    every: OfEveryUser,
    /// From the configuration.
    configured: BTreeMap<u32, OfOneUser>,
    /// From requests; at most [`USERS_MAX`] users together with those of the configuration.
    requested: BTreeMap<u32, OfOneUser>,
}

impl Default for UserLimits {
    fn default() -> Self {
        Self { tables: Mutex::new(Rank::UserLimits, Tables::default()), version: AtomicU64::new(0) }
    }
}

impl UserLimits {
    /// Limits of every user, and of none alone.
    pub fn new(every: OfEveryUser) -> Arc<Self> {
        let limits = Self::default();
        limits.configure(every, BTreeMap::new());
        Arc::new(limits)
    }

    /// Replaces all limits by those of the configuration.
    pub fn configure(&self, every: OfEveryUser, configured: BTreeMap<u32, OfOneUser>) {
        *self.tables.lock() = Tables { every, configured, requested: BTreeMap::new() };
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Changes a user's limits at run time: drops those of earlier requests if `clear` is set, then sets the new ones.
    /// False if too many users have limits of their own.
    pub fn request(&self, uid: u32, clear: bool, new: OfOneUser) -> bool {
        let mut tables = self.tables.lock();
        let before = tables.requested.get(&uid).copied().unwrap_or_default();
        let after = new.over(if clear { OfOneUser::default() } else { before });
        if after == OfOneUser::default() {
            tables.requested.remove(&uid);
        } else if tables.users().len() < USERS_MAX || tables.users().contains(&uid) {
            tables.requested.insert(uid, after);
        } else {
            return false;
        }
        drop(tables);
        self.version.fetch_add(1, Ordering::Release);
        true
    }

    /// The limits of that user.
    pub fn of(&self, uid: u32) -> InForce {
        self.tables.lock().of(uid)
    }

    /// Every user with limits of its own, in order of uid.
    pub fn all(&self) -> Vec<(u32, InForce)> {
        let tables = self.tables.lock();
        tables.users().into_iter().map(|uid| (uid, tables.of(uid))).collect()
    }

    /// Shares of the device's time of users that have another one than [`SHARE`], if anything changed since `seen`,
    /// which is 0 at first.
    pub fn shares_since(&self, seen: &mut u64) -> Option<BTreeMap<u32, u32>> {
        let version = self.version.load(Ordering::Acquire);
        if std::mem::replace(seen, version) == version {
            return None;
        }
        let shares = self.all().into_iter().map(|(uid, limits)| (uid, limits.share.value));
        Some(shares.filter(|(_, share)| *share != SHARE).collect())
    }
}

impl Tables {
    /// Users with limits of their own.
    fn users(&self) -> std::collections::BTreeSet<u32> {
        self.configured.keys().chain(self.requested.keys()).copied().collect()
    }

    fn of(&self, uid: u32) -> InForce {
        let requested = self.requested.get(&uid).copied().unwrap_or_default();
        let configured = self.configured.get(&uid).copied().unwrap_or_default();
        let limit =
            |requested: Option<u32>, configured: Option<u32>, every: u32| match (requested, configured) {
                (Some(value), _) => Limit { value, origin: Origin::Request },
                (None, Some(value)) => Limit { value, origin: Origin::Configuration },
                (None, None) => Limit { value: every, origin: Origin::EveryUser },
            };
        let every = self.every;
        InForce {
            requests: limit(requested.requests, configured.requests, every.requests),
            connections: limit(requested.connections, configured.connections, every.connections),
            passed_models: limit(requested.passed_models, configured.passed_models, every.passed_models),
            share: limit(requested.share, configured.share, SHARE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: OfEveryUser = OfEveryUser { requests: 9, connections: 8, passed_models: 7 };

    fn requests(requests: u32) -> OfOneUser {
        OfOneUser { requests: Some(requests), ..OfOneUser::default() }
    }

    #[test]
    fn a_request_comes_before_the_configuration_and_a_reload_forgets_it() {
        let limits = UserLimits::new(EVERY);
        let configured = OfOneUser { share: Some(50), ..requests(5) };
        limits.configure(EVERY, BTreeMap::from([(1, configured)]));
        let of = |uid| limits.of(uid);
        assert_eq!(of(1).requests, Limit { value: 5, origin: Origin::Configuration });
        assert_eq!(of(2).requests, Limit { value: 9, origin: Origin::EveryUser });
        assert!(limits.request(1, false, requests(3)) && limits.request(2, false, requests(0)));
        let connections = OfOneUser { connections: Some(2), ..OfOneUser::default() };
        assert!(limits.request(1, false, connections), "what a request leaves out stays");
        assert_eq!((of(1).requests.value, of(1).connections.value, of(1).share.value), (3, 2, 50));
        assert_eq!(of(2).requests, Limit { value: 0, origin: Origin::Request });
        assert!(limits.request(1, true, requests(4)), "cleared first");
        assert_eq!((of(1).requests.value, of(1).connections.is_own()), (4, false));
        assert!(limits.request(1, true, OfOneUser::default()));
        assert_eq!(of(1).requests, Limit { value: 5, origin: Origin::Configuration });
        assert_eq!(limits.all().len(), 2);
        limits.configure(EVERY, BTreeMap::new());
        assert_eq!((limits.all(), of(2).requests.words(2)), (vec![], "the limit is 9".to_owned()));
        limits.request(2, false, requests(1));
        assert_eq!(of(2).requests.words(2), "an administrator set the limit of uid 2 to 1");
    }

    #[test]
    fn shares_are_told_once_for_each_change() {
        let (limits, mut seen) = (UserLimits::default(), 0);
        assert_eq!(limits.shares_since(&mut seen), None);
        let share = |share| OfOneUser { share: Some(share), ..OfOneUser::default() };
        limits.request(1, false, share(50));
        limits.request(2, false, share(SHARE));
        assert_eq!(limits.shares_since(&mut seen), Some(BTreeMap::from([(1, 50)])));
        limits.request(1, true, OfOneUser::default());
        assert_eq!(limits.shares_since(&mut seen), Some(BTreeMap::new()));
        assert_eq!(limits.shares_since(&mut seen), None);
        assert_eq!(limits.shares_since(&mut 0), Some(BTreeMap::new()), "to a schedule that was made anew");
    }

    #[test]
    fn values_have_ranges_and_users_a_number() {
        let wrong = OfOneUser { share: Some(0), ..requests(0) };
        assert_eq!(wrong.check().unwrap_err().to_string(), "share = 0 is not in 1..=1000");
        assert_eq!(requests(0).check(), Ok(()), "a user may be barred");
        assert!(requests((1 << 20) + 1).check().is_err());
        let limits = UserLimits::default();
        assert!((0..USERS_MAX as u32).all(|uid| limits.request(uid, false, requests(1))));
        assert!(!limits.request(5000, false, requests(1)) && limits.request(7, false, requests(2)));
        assert!(limits.request(7, true, OfOneUser::default()) && limits.request(5000, false, requests(1)));
    }
}
