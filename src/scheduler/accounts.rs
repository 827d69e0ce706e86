//! Device time by user: decides whose sequences run next.
//!
//! Each user has an account of the device time charged to it, and the user with the least runs next. Time is charged in
//! inverse proportion to the user's share: a user with half of another's share gets half of the time. A user that comes
//! back starts where the user with the least account stands. It gets back the time that it was idle, at most
//! [`HEAD_START`]: a short request is answered before long ones go on. So users with work get their shares of the
//! device, and a user alone gets all of it. Connections of one user have such accounts too. Pure: callers pass in the
//! times.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::share::limits::SHARE;

/// Most device time that idleness earns.
pub(super) const HEAD_START: Duration = Duration::from_millis(100);

/// Of more accounts, those of users that left behind the clock are forgotten.
const KEPT: usize = 64;

/// The accounts of all users with live sequences, or of all connections of one user.
#[derive(Debug)]
pub(super) struct Accounts<K> {
    charged: BTreeMap<K, Duration>,
    /// The least account at the last choice; it never falls.
    clock: Duration,
    /// Users that could run at the last choice.
    active: BTreeSet<K>,
    /// Shares of users that have another one than [`SHARE`].
    shares: BTreeMap<K, u32>,
}

impl<K> Default for Accounts<K> {
    fn default() -> Self {
        let (charged, active, shares) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
        Self { charged, clock: Duration::ZERO, active, shares }
    }
}

impl<K: Copy + Ord> Accounts<K> {
    /// Chooses among the users that can run: the one with the least account; among equals a newcomer, then the lowest
    /// uid.
    pub fn choose(&mut self, runnable: BTreeSet<K>) -> Option<K> {
        self.choose_beside(runnable, &BTreeSet::new())
    }

    /// As [`Accounts::choose`], beside users that wait for work of their own: that time earns nothing. When it did, users of slow masks
    /// led as soon as their masks were there. Four of them kept another user's answer out of every fourth step.
    pub fn choose_beside(&mut self, runnable: BTreeSet<K>, wait: &BTreeSet<K>) -> Option<K> {
        let before = self.clock;
        if let Some(least) = self.active.iter().map(|uid| self.of(*uid)).min() {
            self.clock = self.clock.max(least);
        }
        for uid in wait {
            if let Some(account) = self.charged.get_mut(uid) {
                let behind = before.saturating_sub(*account);
                *account = (*account).max(self.clock.saturating_sub(behind));
            }
        }
        for uid in runnable.difference(&self.active) {
            let account = self.charged.entry(*uid).or_default();
            *account = (*account).max(self.clock.saturating_sub(HEAD_START));
        }
        let least = |uid: &K| (self.of(*uid), self.active.contains(uid));
        let chosen = runnable.iter().copied().min_by_key(least);
        self.active = runnable;
        chosen
    }

    /// Replaces the shares of users that have another one than [`SHARE`]. Earlier charges stay as they are.
    pub fn set_shares(&mut self, shares: BTreeMap<K, u32>) {
        self.shares = shares;
    }

    /// A user's share of the device; at least 1.
    pub fn share(&self, uid: K) -> u32 {
        self.shares.get(&uid).map_or(SHARE, |share| (*share).max(1))
    }

    /// Adds device time to a user's account.
    pub fn charge(&mut self, uid: K, time: Duration) {
        let account = self.after(uid, time);
        self.charged.insert(uid, account);
    }

    /// A user's account after so much more device time.
    pub fn after(&self, uid: K, time: Duration) -> Duration {
        let cost = time.saturating_mul(SHARE) / self.share(uid);
        self.of(uid).saturating_add(cost)
    }

    /// A user's account. Only differences between accounts mean something.
    pub fn of(&self, uid: K) -> Duration {
        self.charged.get(&uid).copied().unwrap_or(self.clock)
    }

    /// Forgets users without live sequences whose idleness earned all that it may. Others are remembered: one that leaves
    /// for a moment after each answer would earn [`HEAD_START`] each time, and twice a fair share.
    pub fn forget_except(&mut self, live: &BTreeSet<K>) {
        let earned = self.clock.saturating_sub(HEAD_START);
        self.charged.retain(|uid, account| live.contains(uid) || *account > earned);
        if self.charged.len() > KEPT {
            let clock = self.clock;
            self.charged.retain(|uid, account| live.contains(uid) || *account > clock);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn set(uids: &[u32]) -> BTreeSet<u32> {
        uids.iter().copied().collect()
    }

    #[test]
    fn users_with_work_get_equal_time_whatever_a_turn_of_theirs_costs() {
        let mut accounts = Accounts::default();
        let mut got = BTreeMap::from([(1, Duration::ZERO), (2, Duration::ZERO), (3, Duration::ZERO)]);
        for _ in 0..10_000 {
            let uid = accounts.choose(set(&[1, 2, 3])).unwrap();
            let time = MS * [1, 7, 40][uid as usize - 1];
            accounts.charge(uid, time);
            *got.entry(uid).or_default() += time;
        }
        let (least, most) = (got.values().min().unwrap(), got.values().max().unwrap());
        assert!(*most - *least <= 40 * MS, "{got:?}");
    }

    #[test]
    fn users_get_time_by_their_shares() {
        let mut accounts = Accounts::default();
        accounts.set_shares(BTreeMap::from([(1, 50), (3, 400)]));
        let mut got = BTreeMap::from([(1, Duration::ZERO), (2, Duration::ZERO), (3, Duration::ZERO)]);
        let mut run = |accounts: &mut Accounts<u32>, turns| {
            got.values_mut().for_each(|time| *time = Duration::ZERO);
            for _ in 0..turns {
                let uid = accounts.choose(set(&[1, 2, 3])).unwrap();
                let time = MS * [40, 7, 1][uid as usize - 1];
                accounts.charge(uid, time);
                *got.entry(uid).or_default() += time;
            }
            let all: Duration = got.values().sum();
            [1, 2, 3].map(|uid| (1000.0 * got[&uid].as_secs_f64() / all.as_secs_f64()).round())
        };
        let near = |found: [f64; 3], wanted: [f64; 3]| {
            assert!(
                found.iter().zip(wanted).all(|(found, wanted)| (found - wanted).abs() <= 5.0),
                "{found:?}"
            );
        };
        near(run(&mut accounts, 100_000), [90.9, 181.8, 727.3]);
        accounts.set_shares(BTreeMap::new());
        near(run(&mut accounts, 100_000), [333.3, 333.3, 333.3]);
        assert_eq!(accounts.after(1, MS), accounts.of(1) + MS);
    }

    #[test]
    fn idle_time_earns_little_and_time_ahead_is_remembered() {
        let mut accounts = Accounts::default();
        for _ in 0..100 {
            assert_eq!(accounts.choose(set(&[1])), Some(1));
            accounts.charge(1, 10 * MS);
        }
        assert_eq!(accounts.choose(set(&[1, 2])), Some(2), "a newcomer does not wait");
        accounts.charge(2, HEAD_START + 60 * MS);
        accounts.choose(set(&[1])); // user 2 leaves
        let turns = (0..7).map(|_| {
            let uid = accounts.choose(set(&[1, 2])).unwrap();
            accounts.charge(uid, 10 * MS);
            uid
        });
        assert_eq!(turns.collect::<Vec<_>>(), [1, 1, 1, 1, 1, 1, 1], "it comes back as far ahead as it left");
    }

    #[test]
    fn time_that_a_user_waits_for_its_own_work_earns_nothing() {
        let mut accounts = Accounts::default();
        let run = |accounts: &mut Accounts<u32>, can: &[u32], wait: &[u32]| {
            let uid = accounts.choose_beside(set(can), &set(wait)).unwrap();
            accounts.charge(uid, 5 * MS);
            uid
        };
        for _ in 0..40 {
            run(&mut accounts, &[1, 2], &[]);
        }
        for _ in 0..100 {
            // The second user can run in each tenth turn alone.
            for _ in 0..9 {
                run(&mut accounts, &[1], &[2]);
            }
            run(&mut accounts, &[1, 2], &[]);
            let ahead = accounts.of(1).saturating_sub(accounts.of(2));
            assert!(ahead <= 10 * MS, "{ahead:?}");
        }
        // A debt is paid by waiting, and what idleness earned before is kept.
        accounts.charge(2, 300 * MS);
        for _ in 0..30 {
            run(&mut accounts, &[1], &[2]);
        }
        let debt = accounts.of(2) - accounts.of(1);
        assert!((130 * MS..170 * MS).contains(&debt), "{debt:?}");
        for _ in 0..50 {
            run(&mut accounts, &[1], &[]);
        }
        for _ in 0..50 {
            run(&mut accounts, &[1], &[2]);
        }
        let led = (0..100).take_while(|_| run(&mut accounts, &[1, 2], &[]) == 2).count();
        assert!((18..=22).contains(&led), "{led} turns of 5 ms: what idleness earned at most");
    }

    #[test]
    fn users_that_left_are_forgotten() {
        let mut accounts = Accounts::default();
        for uid in 0..1000 {
            accounts.choose(set(&[uid]));
            accounts.charge(uid, MS);
        }
        accounts.choose(set(&[1000]));
        accounts.forget_except(&set(&[1000]));
        assert!(accounts.charged.len() <= 2, "{}", accounts.charged.len());
        for _ in 0..200 {
            accounts.choose(set(&[1000]));
            accounts.charge(1000, MS);
        }
        accounts.charge(1, MS);
        accounts.choose(set(&[1000]));
        accounts.forget_except(&set(&[1000]));
        assert_eq!(accounts.charged.len(), 2, "user 1 left just now");
    }

    #[test]
    fn leaving_for_a_moment_earns_nothing() {
        let mut accounts = Accounts::default();
        let mut got = [Duration::ZERO; 2];
        for _ in 0..10_000 {
            let uid = accounts.choose(set(&[0, 1])).unwrap();
            accounts.charge(uid, 5 * MS);
            got[uid as usize] += 5 * MS;
            if uid == 1 {
                // Its answer ends, and it asks again at once.
                accounts.choose(set(&[0]));
                accounts.forget_except(&set(&[0]));
            }
        }
        let part = got[1].as_secs_f64() / (got[0] + got[1]).as_secs_f64();
        assert!((0.49..0.51).contains(&part), "{part}");
    }
}
