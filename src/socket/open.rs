//! The open connections: who has how many, and which one ends when a newcomer finds no room.
//!
//! Users share connections by [`Shares`]. A connection without an open stream costs its user nothing, so it may stay
//! for as long as nobody else wants its place. A newcomer may be refused although it holds less than the user that
//! holds most. Then that user's longest idle connection ends, and the newcomer takes its place.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::lock::{Mutex, Rank};
use crate::session::SessionWatch;
use crate::share::limits::UserLimits;
use crate::share::{Charge, Refusal, Shares, Taker, Whose};

/// A connection is idle when it has no open stream and moved no byte for this long.
pub(super) const IDLE: Duration = Duration::from_secs(5);

/// After a search found no idle connection, the next search waits this long. A search looks at each connection, so a
/// refused user that connects again and again must not cause one each time.
const SEARCH_AGAIN: Duration = Duration::from_millis(250);

/// All open connections.
#[derive(Debug)]
pub(super) struct Open {
    shares: Arc<Shares>,
    users: Arc<UserLimits>,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// By a number of their own.
    connections: HashMap<u64, Entry>,
    last: u64,
    /// Start of the next search for an idle connection.
    search_at: Option<Instant>,
}

#[derive(Debug)]
struct Entry {
    taker: Taker,
    charge: Charge,
    life: Arc<Life>,
}

/// Signs of life of one connection, and its end.
#[derive(Debug)]
pub(super) struct Life {
    began: Instant,
    /// Milliseconds from `began` to the last byte.
    last_byte_ms: AtomicU64,
    session: OnceLock<SessionWatch>,
    /// Cancelled when another connection took the place.
    pub given_up: CancellationToken,
}

/// The place of one connection, held until this drops.
#[derive(Debug)]
pub(super) struct Place {
    open: Arc<Open>,
    number: u64,
    life: Arc<Life>,
}

impl Place {
    pub fn life(&self) -> Arc<Life> {
        Arc::clone(&self.life)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Removed already where another connection took the place.
        let entry = self.open.table.lock().connections.remove(&self.number);
        drop(entry);
    }
}

impl Life {
    fn new(now: Instant) -> Arc<Self> {
        Arc::new(Self {
            began: now,
            last_byte_ms: AtomicU64::new(0),
            session: OnceLock::new(),
            given_up: CancellationToken::new(),
        })
    }

    /// Call when a byte was read or written.
    pub fn moved(&self) {
        let ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_byte_ms.store(ms, Ordering::Relaxed);
    }

    /// Call once the hello was exchanged.
    pub fn serves(&self, session: SessionWatch) {
        let _ = self.session.set(session);
    }

    fn last_byte(&self) -> Instant {
        self.began + Duration::from_millis(self.last_byte_ms.load(Ordering::Relaxed))
    }

    fn is_idle(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last_byte()) >= IDLE
            && self.session.get().is_none_or(|session| !session.has_open_streams())
    }
}

impl Open {
    /// Users share connections by `shares`, and each has at most what `users` says.
    pub fn new(shares: Arc<Shares>, users: Arc<UserLimits>) -> Arc<Self> {
        Arc::new(Self { shares, users, table: Mutex::new(Rank::Connections, Table::default()) })
    }

    /// A place for one more connection of that user; ends an idle one if there is none.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn place(self: &Arc<Self>, taker: Taker, now: Instant) -> Result<Place, Refusal> {
        let mut table = self.table.lock();
        let bound = self.users.of(taker.uid).connections.value;
        let charge = match self.shares.take_within(taker, 1, bound.into()) {
            Ok(charge) => charge,
            Err(refusal) => {
                let from = self.may_push_out(taker, &refusal).ok_or(refusal)?;
                let mut charge = table.push_out(from, now).ok_or(refusal)?;
                charge.hand_over(taker);
                charge
            }
        };
        table.last = table.last.wrapping_add(1);
        let (number, life) = (table.last, Life::new(now));
        table.connections.insert(number, Entry { taker, charge, life: Arc::clone(&life) });
        Ok(Place { open: Arc::clone(self), number, life })
    }

    /// The uid whose idle connection may end for the refused user's sake. A privileged user that has its fixed bound
    /// replaces its own: an administrator is never shut out.
    fn may_push_out(&self, taker: Taker, refusal: &Refusal) -> Option<u32> {
        if refusal.fixed {
            return taker.privileged.then_some(taker.uid);
        }
        let (uid, most) = self.shares.most()?;
        let less = refusal.own < most && refusal.whose == Whose::Everybody;
        (less || taker.privileged).then_some(uid)
    }
}

impl Table {
    /// Ends the longest idle connection of that user and returns its charge.
    fn push_out(&mut self, uid: u32, now: Instant) -> Option<Charge> {
        if self.search_at.is_some_and(|at| now < at) {
            return None;
        }
        let of_uid = self.connections.iter().filter(|(_, entry)| entry.taker.uid == uid);
        let idle = of_uid.filter(|(_, entry)| entry.life.is_idle(now));
        let longest = idle.min_by_key(|(_, entry)| entry.life.last_byte()).map(|(number, _)| *number);
        let entry = longest.and_then(|number| self.connections.remove(&number));
        self.search_at = entry.is_none().then(|| now + SEARCH_AGAIN);
        let entry = entry?;
        entry.life.given_up.cancel();
        Some(entry.charge)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::share::limits::{OfEveryUser, OfOneUser};

    fn user(uid: u32) -> Taker {
        Taker { uid, privileged: false }
    }

    fn open(total: u32, connections: u32) -> Arc<Open> {
        let users = UserLimits::new(OfEveryUser { connections, ..OfEveryUser::default() });
        Open::new(Shares::new(total.into()), users)
    }

    fn count(open: &Open) -> usize {
        open.table.lock().connections.len()
    }

    /// Connects until refused.
    fn crowd(open: &Arc<Open>, taker: Taker, now: Instant) -> (Vec<Place>, Refusal) {
        let mut places = Vec::new();
        loop {
            match open.place(taker, now) {
                Ok(place) => places.push(place),
                Err(refusal) => return (places, refusal),
            }
        }
    }

    #[test]
    fn two_greedy_users_leave_room_for_a_third_and_for_root() {
        let now = Instant::now();
        let open = open(8192, 4096);
        let (first, refusal) = crowd(&open, user(1), now);
        assert_eq!((first.len(), refusal.whose), (3840, Whose::Own));
        let (second, _) = crowd(&open, user(2), now);
        let (third, _) = crowd(&open, user(3), now);
        let root = crowd(&open, Taker { uid: 0, privileged: true }, now).0;
        assert_eq!([second.len(), third.len(), root.len()], [1920, 960, 736]);
        assert_eq!(count(&open), 3840 + 1920 + 960 + 736);
        drop((first, second, third, root));
        assert_eq!((count(&open), open.shares.held()), (0, 0));
    }

    #[test]
    fn a_newcomer_takes_the_place_of_the_longest_idle() {
        let now = Instant::now();
        let open = open(8, 8);
        let (greedy, _) = crowd(&open, user(1), now);
        let (second, refusal) = crowd(&open, user(2), now);
        assert_eq!((greedy.len(), second.len(), refusal.whose), (4, 2, Whose::Own));
        assert!(
            open.place(user(2), now + IDLE).is_err(),
            "it has its part of the eight, so nobody makes room"
        );
        let (mut third, refusal) = crowd(&open, user(3), now);
        assert_eq!((third.len(), refusal.whose), (1, Whose::Everybody));
        for (place, last_byte_ms) in greedy.iter().zip([300, 200, 100, 400]) {
            place.life.last_byte_ms.store(last_byte_ms, Ordering::Relaxed);
        }
        let almost = now + Duration::from_millis(5099);
        assert!(open.place(user(3), almost).is_err(), "no connection was idle for 5 s");
        assert!(open.place(user(3), almost + Duration::from_millis(1)).is_err(), "the next search waits");
        third.push(open.place(user(3), almost + SEARCH_AGAIN).unwrap());
        let given_up = || greedy.iter().map(|place| place.life.given_up.is_cancelled()).collect::<Vec<_>>();
        assert_eq!(given_up(), [false, false, true, false]);
        third.push(open.place(user(4), now).unwrap());
        third.push(open.place(user(5), almost + SEARCH_AGAIN).unwrap());
        assert_eq!(given_up(), [false, true, true, false]);
        assert_eq!((count(&open), open.shares.held()), (8, 8));
        drop((greedy, second, third));
        assert_eq!(open.shares.held(), 0, "a place that was given up is not given back twice");
    }

    #[test]
    fn a_fixed_bound_ends_nobody_but_an_administrator_replaces_its_own() {
        let (now, open) = (Instant::now(), open(64, 2));
        let late = now + IDLE;
        let (ordinary, refusal) = crowd(&open, user(1), now);
        assert_eq!((ordinary.len(), refusal.whose, refusal.fixed), (2, Whose::Own, true));
        assert!(open.place(user(1), late).is_err());
        let root = Taker { uid: 0, privileged: true };
        let own = crowd(&open, root, now).0;
        assert_eq!(own.len(), 2);
        assert!(open.place(root, now + SEARCH_AGAIN).is_err(), "none is idle");
        assert!(open.place(root, late).is_ok());
        assert!(!ordinary.iter().any(|place| place.life.given_up.is_cancelled()));
    }

    #[test]
    fn a_users_own_bound_takes_the_place_of_every_users() {
        let (now, open) = (Instant::now(), open(64, 2));
        for (uid, connections) in [(1, 1), (2, 5)] {
            let own = OfOneUser { connections: Some(connections), ..OfOneUser::default() };
            open.users.request(uid, false, own);
        }
        let crowds = [1, 2, 3].map(|uid| crowd(&open, user(uid), now));
        assert_eq!(crowds.each_ref().map(|(places, _)| places.len()), [1, 5, 2]);
        assert!(crowds.iter().all(|(_, refusal)| refusal.fixed));
        open.users.request(1, true, OfOneUser::default());
        assert!(open.place(user(1), now).is_ok());
    }
}
