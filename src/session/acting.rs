//! Clients that act for other users: programs such as a gateway, whose own clients the kernel does not tell apart.
//!
//! The configuration gives a user a range of uids that no real user has. A connection of that user may say in its hello
//! which of them it acts for. All that it has and takes then counts for that uid. Its rights are those that the policy gives
//! the peer, but never an administrator's.

use std::collections::BTreeMap;

use rocmforge_client::wire::{ClientHello, ErrorCode, Subordinates};

use super::error::{Failure, failure};
use super::policy::{Credentials, Policy};
use super::service::Service;
use crate::share::limits::UID_MAX;

/// The least uid of a user that another one may act for. Programs that give uids to users and containers stay below it, because many
/// programs take uids for signed numbers.
pub const SUBORDINATE_MIN: u32 = 1 << 31;

/// Why uids cannot be those of users that another one acts for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubordinatesError {
    /// None, too small or too large ones.
    #[error(
        "{count} uids from {first} on are not within {SUBORDINATE_MIN} to {UID_MAX}: below are those of real users, and one at least is needed"
    )]
    Range {
        /// The first uid.
        first: u32,
        /// How many.
        count: u32,
    },
    /// A real user has one of them.
    #[error("uid {uid} among them is that of {whose}: choose others")]
    Taken {
        /// The uid.
        uid: u32,
        /// Its user.
        whose: String,
    },
    /// Another user may act for one of them.
    #[error("uid {uid} among them is one that uid {by} may act for: choose others")]
    Overlap {
        /// The uid.
        uid: u32,
        /// The other user.
        by: u32,
    },
}

/// The users that each user may act for, by uid. No two of them have a uid in common.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActsFor(BTreeMap<u32, Subordinates>);

impl ActsFor {
    /// Lets the user `by` act for these; in place of others, if it had any.
    ///
    /// # Errors
    /// [`SubordinatesError::Range`], [`SubordinatesError::Overlap`].
    pub fn insert(&mut self, by: u32, all: Subordinates) -> Result<(), SubordinatesError> {
        let Subordinates { first, count } = all;
        let out_of_range = SubordinatesError::Range { first, count };
        let last = last(all).filter(|last| first >= SUBORDINATE_MIN && *last <= UID_MAX);
        let last = last.ok_or(out_of_range)?;
        for (other, theirs) in self.0.iter().filter(|(other, _)| **other != by) {
            let uid = first.max(theirs.first);
            if has(*theirs, uid) && uid <= last {
                return Err(SubordinatesError::Overlap { uid, by: *other });
            }
        }
        self.0.insert(by, all);
        Ok(())
    }

    /// The users that this one may act for.
    pub fn of(&self, by: u32) -> Option<Subordinates> {
        self.0.get(&by).copied()
    }

    /// True if somebody may act for that user.
    pub fn holds(&self, uid: u32) -> bool {
        uid >= SUBORDINATE_MIN && self.0.values().any(|all| has(*all, uid))
    }
}

/// The last uid, if there is one.
fn last(all: Subordinates) -> Option<u32> {
    all.first.checked_add(all.count.checked_sub(1)?)
}

fn has(all: Subordinates, uid: u32) -> bool {
    uid.checked_sub(all.first).is_some_and(|number| number < all.count)
}

/// Why a client is refused by the user that it would count for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ActRefused {
    /// It may act for nobody.
    #[error("policy.subordinates gives this user no others to act for")]
    Nobody,
    /// It may act for fewer users.
    #[error(
        "it asked to act for its user {number}, but policy.subordinates gives it {count}, numbered from 0"
    )]
    Number {
        /// The number of the user.
        number: u32,
        /// The number of users.
        count: u32,
    },
    /// Others act for users of this uid.
    #[error("its uid is one that policy.subordinates lets others act for: change that range")]
    Subordinate,
}

impl Policy {
    /// The user that a client counts for by its hello.
    ///
    /// # Errors
    /// [`ActRefused`].
    fn user_of(&self, peer: Credentials, hello: &ClientHello) -> Result<Credentials, ActRefused> {
        if self.acts_for.holds(peer.uid) {
            return Err(ActRefused::Subordinate);
        }
        let Some(number) = hello.acts_as() else { return Ok(peer) };
        let all = self.acts_for.of(peer.uid).ok_or(ActRefused::Nobody)?;
        let uid = Some(number).filter(|number| *number < all.count).and_then(|it| all.first.checked_add(it));
        let uid = uid.ok_or(ActRefused::Number { number, count: all.count })?;
        Ok(Credentials { uid, by: Some(peer.uid), ..peer })
    }

    /// Refuses requests of a connection that acted for a user before a reload of the configuration took that away.
    pub(super) fn check_acting(&self, credentials: &Credentials) -> Result<(), Failure> {
        let Credentials { uid, by: Some(by), .. } = credentials else { return Ok(()) };
        if self.acts_for.of(*by).is_some_and(|all| has(all, *uid)) {
            return Ok(());
        }
        let text = format!(
            "policy.subordinates no longer lets uid {by} act for uid {uid}: connect again, or change the daemon's configuration"
        );
        let refusal = failure(ErrorCode::Forbidden, &text);
        Err(refusal.with_detail("rule", "policy.subordinates").with_detail("uid", uid))
    }
}

impl Service {
    /// The user that a client counts for by its hello.
    ///
    /// # Errors
    /// [`ActRefused`]: answer with `Forbidden`.
    pub fn user_of(&self, peer: Credentials, hello: &ClientHello) -> Result<Credentials, ActRefused> {
        self.policy().user_of(peer, hello)
    }

    /// The users that the client may act for. One that acts already may act for no others.
    pub(super) fn subordinates_of(&self, credentials: &Credentials) -> Option<Subordinates> {
        self.policy().acts_for.of(credentials.uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::{Right, Who};

    const FIRST: u32 = 3_000_000_000;

    fn range(first: u32, count: u32) -> Subordinates {
        Subordinates { first, count }
    }

    fn peer(uid: u32) -> Credentials {
        Credentials { uid, gids: vec![70], by: None }
    }

    fn policy() -> Policy {
        let mut policy = Policy::default();
        policy.acts_for.insert(7, range(FIRST, 10)).unwrap();
        policy
    }

    #[test]
    fn ranges_hold_no_real_user_and_do_not_overlap() {
        let mut all = ActsFor::default();
        for wrong in [
            range(FIRST, 0),
            range(SUBORDINATE_MIN - 1, 2),
            range(1000, 1),
            range(UID_MAX, 2),
            range(FIRST, u32::MAX),
        ] {
            let Subordinates { first, count } = wrong;
            assert_eq!(all.insert(7, wrong), Err(SubordinatesError::Range { first, count }));
        }
        for (by, fitting) in [(1, range(SUBORDINATE_MIN, 10)), (2, range(FIRST, 100)), (3, range(UID_MAX, 1))]
        {
            assert_eq!(all.insert(by, fitting), Ok(()));
        }
        let overlaps = [
            (range(FIRST, 1), FIRST, 2),
            (range(FIRST - 5, 6), FIRST, 2),
            (range(FIRST + 99, 5), FIRST + 99, 2),
            (range(FIRST + 10, 10), FIRST + 10, 2),
            (range(SUBORDINATE_MIN + 9, 1), SUBORDINATE_MIN + 9, 1),
            (range(UID_MAX - 1, 2), UID_MAX, 3),
        ];
        for (range, uid, by) in overlaps {
            assert_eq!(all.insert(9, range), Err(SubordinatesError::Overlap { uid, by }), "{range:?}");
        }
        assert_eq!(all.insert(9, range(FIRST - 5, 5)), Ok(()));
        assert_eq!(all.insert(9, range(FIRST + 100, 5)), Ok(()), "in place of the one before");
        assert!(all.holds(FIRST + 104) && !all.holds(FIRST + 105) && !all.holds(FIRST - 1) && !all.holds(7));
    }

    #[test]
    fn a_peer_acts_for_its_own_subordinates_alone() {
        let policy = policy();
        let hello = ClientHello::new("t");
        let acting = |by: u32, number| policy.user_of(peer(by), &hello.clone().acting_as(number));
        assert_eq!(policy.user_of(peer(7), &hello), Ok(peer(7)), "without a word it is itself");
        assert_eq!(acting(7, 9).unwrap(), Credentials { uid: FIRST + 9, gids: vec![70], by: Some(7) });
        assert_eq!(acting(7, 10), Err(ActRefused::Number { number: 10, count: 10 }));
        assert_eq!(acting(7, u32::MAX), Err(ActRefused::Number { number: u32::MAX, count: 10 }));
        assert_eq!(acting(8, 0), Err(ActRefused::Nobody));
        assert_eq!(acting(0, 0), Err(ActRefused::Nobody), "root neither, unless it is told to");
        assert_eq!(policy.user_of(peer(FIRST), &hello), Err(ActRefused::Subordinate));
    }

    #[test]
    fn a_connection_that_acts_has_the_peers_rights_and_never_an_administrators() {
        let who = |uid| Who { uids: [uid].into(), ..Who::default() };
        let mut policy = policy();
        policy.rules[Right::Run as usize] = who(7);
        policy.rules[Right::Load as usize] = Who { gids: [70].into(), ..Who::default() };
        policy.rules[Right::Pin as usize] = who(FIRST + 1);
        policy.rules[Right::Unload as usize] = who(8);
        policy.administrators = Who { uids: [7, FIRST + 1].into(), gids: [70].into(), ..Who::default() };
        let acting = policy.user_of(peer(7), &ClientHello::new("t").acting_as(1)).unwrap();
        assert!(policy.is_administrator(&peer(7)) && !policy.is_administrator(&acting));
        assert!(!policy.is_administrator(&Credentials { by: Some(0), ..peer(FIRST) }));
        let has: Vec<Right> = Right::ALL.into_iter().filter(|right| policy.allows(&acting, *right)).collect();
        assert_eq!(has, [Right::Run, Right::Load, Right::Preload, Right::Pin]);
        assert!(
            policy.rights(&acting).ends_with("; acting for uid 3000000001"),
            "{}",
            policy.rights(&acting)
        );
    }

    #[test]
    fn users_that_a_reload_takes_away_are_refused_in_words() {
        let mut policy = policy();
        let acting = policy.user_of(peer(7), &ClientHello::new("t").acting_as(9)).unwrap();
        assert!(policy.check_acting(&acting).is_ok() && policy.check_acting(&peer(1)).is_ok());
        policy.acts_for.insert(7, range(FIRST, 9)).unwrap();
        let refusal = policy.check_acting(&acting).unwrap_err();
        assert_eq!(refusal.code, ErrorCode::Forbidden as u16);
        assert!(refusal.message.contains("uid 7 act for uid 3000000009"), "{refusal}");
        policy.acts_for = ActsFor::default();
        assert!(policy.check_acting(&acting).is_err());
    }
}
