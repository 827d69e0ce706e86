//! The places of open connections, and the one that ends when a newcomer finds none.
//!
//! A connection waits before its first request, between two requests, and while a request's head or body is incomplete. It costs
//! little, and may stay until its place is wanted. Where all places are taken, the peer that has most waiting connections loses the
//! one that has waited longest. One that sends a body goes only if the peer has no other. A connection whose request is whole is
//! never closed for another one.
//!
//! So only whole requests keep others out. A peer may have as many as would then still be free, where peers are told apart.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, watch};

use crate::access::Peer;

/// Most peers of a report; all others are one line.
const REPORTED_MAX: usize = 4;

/// Most peers that are counted for the next report.
const COUNTED_MAX: usize = 64;

/// All places, and who has them.
#[derive(Debug)]
pub struct Places {
    total: usize,
    table: Mutex<Table>,
    /// True if a newcomer would get a place.
    room: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct Table {
    /// Places taken.
    held: usize,
    /// Those of them whose connection waits for a head, and for a body.
    heads: usize,
    bodies: usize,
    /// Those of them whose connection has a whole request. Each of the rest is read soon, and then waits or has one.
    whole: usize,
    /// Those of them with a request under way that counts for its peer.
    asking: usize,
    /// How many connections began to wait.
    turns: u64,
    /// Peers that have something here.
    peers: HashMap<Peer, Holding>,
    closed: Closed,
}

/// The order in which a peer's waiting connections lose their places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn {
    /// The bytes that it waits for.
    pub rest: Rest,
    /// The connections that began to wait before it.
    number: u64,
}

/// The bytes that a waiting connection lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rest {
    /// A request's head, or all of it.
    Head,
    /// The end of its body: more of it was done.
    Body,
}

/// The connections and requests of a peer.
#[derive(Debug, Default)]
struct Holding {
    /// Connections that wait: the first loses its place first. Each is told if it is gone.
    waiting: BTreeMap<Turn, Arc<Notify>>,
    /// Requests under way.
    asking: usize,
}

/// Connections closed since the last report.
#[derive(Debug, Default)]
struct Closed {
    of: HashMap<Peer, Count>,
    others: Count,
}

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    /// Closed for newcomers.
    room: u64,
    /// Closed because no whole head of a request came in time.
    late: u64,
}

/// The end of a connection by the gateway's own decision.
#[derive(Clone, Copy, Debug)]
pub enum Reason {
    /// A newcomer needs its place.
    Room,
    /// No whole head of a request came in time.
    Late,
}

/// A peer's requests take all of the places that one may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// The peer's other requests under way.
    pub own: usize,
    /// All places.
    pub total: usize,
}

impl Places {
    /// So many places, all free.
    pub fn new(total: usize) -> Arc<Self> {
        let room = watch::Sender::new(total > 0);
        Arc::new(Self { total, table: Mutex::default(), room })
    }

    /// Waits until a newcomer would get a place.
    pub async fn room(&self) {
        self.until(true).await;
    }

    /// Waits until a newcomer would get none.
    pub async fn full(&self) {
        self.until(false).await;
    }

    async fn until(&self, room: bool) {
        // The sender lives as long as this: waiting cannot fail.
        let _ = self.room.subscribe().wait_for(|now| *now == room).await;
    }

    /// Takes a place for a newcomer: a free one, or that of a connection that waits. Call it after [`Places::room`]. If the
    /// last one that waited has begun a request since, there is one place more for the moment.
    pub fn take(&self) {
        let mut table = self.table();
        if table.held >= self.total && table.gives_way() {
            table.push_out();
        }
        table.held += 1;
        self.tell(table);
    }

    /// A connection has a whole request, or has one no more.
    pub fn is_whole(&self, whole: bool) {
        let mut table = self.table();
        table.whole = if whole { table.whole + 1 } else { table.whole.saturating_sub(1) };
        self.tell(table);
    }

    /// Closes the connection that would go next. False if none waits.
    pub fn push_out(&self) -> bool {
        let mut table = self.table();
        let closed = table.push_out();
        self.tell(table);
        closed
    }

    /// Gives a place back.
    pub fn free(&self) {
        let mut table = self.table();
        table.held = table.held.saturating_sub(1);
        self.tell(table);
    }

    /// A connection of that peer begins to wait for bytes. Returns its turn.
    pub fn wait(&self, peer: Peer, rest: Rest, closed: &Arc<Notify>) -> Turn {
        let mut table = self.table();
        table.turns += 1;
        let turn = Turn { rest, number: table.turns };
        *table.count(rest) += 1;
        table.peers.entry(peer).or_default().waiting.insert(turn, Arc::clone(closed));
        self.tell(table);
        turn
    }

    /// A connection waits no longer. False if another one has its place.
    pub fn go_on(&self, peer: Peer, turn: Turn) -> bool {
        let mut table = self.table();
        let Entry::Occupied(mut of) = table.peers.entry(peer) else { return false };
        let waited = of.get_mut().waiting.remove(&turn).is_some();
        if of.get().is_nothing() {
            of.remove();
        }
        if waited {
            *table.count(turn.rest) -= 1;
        }
        self.tell(table);
        waited
    }

    /// Counts a request of that peer as under way until [`Places::answered`]. `bounded` if others may be kept out by it: then a
    /// peer has at most as many as would still be free. It may always have one.
    ///
    /// # Errors
    /// [`Full`]; then nothing is counted.
    pub fn ask(&self, peer: Peer, bounded: bool) -> Result<(), Full> {
        let mut table = self.table();
        let own = table.peers.get(&peer).map_or(0, |of| of.asking);
        let left = self.total.saturating_sub(table.asking + 1);
        if bounded && own > 0 && own + 1 > left {
            return Err(Full { own, total: self.total });
        }
        table.asking += 1;
        table.peers.entry(peer).or_default().asking += 1;
        Ok(())
    }

    /// A request of that peer has its answer.
    pub fn answered(&self, peer: Peer) {
        let mut table = self.table();
        let Entry::Occupied(mut of) = table.peers.entry(peer) else { return };
        of.get_mut().asking = of.get().asking.saturating_sub(1);
        if of.get().is_nothing() {
            of.remove();
        }
        table.asking = table.asking.saturating_sub(1);
    }

    /// Counts a connection of that peer, closed for lack of a request.
    pub fn late(&self, peer: Peer) {
        self.table().closed.count(peer, Reason::Late);
    }

    /// The connections that were closed since the last report, as a line for the log.
    pub fn report(&self) -> Option<String> {
        std::mem::take(&mut self.table().closed).report()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells those who wait for room of a change.
    fn tell(&self, table: MutexGuard<'_, Table>) {
        let room = table.held < self.total || table.gives_way();
        self.room.send_if_modified(|before| std::mem::replace(before, room) != room);
        drop(table);
    }
}

impl Table {
    fn count(&mut self, rest: Rest) -> &mut usize {
        match rest {
            Rest::Head => &mut self.heads,
            Rest::Body => &mut self.bodies,
        }
    }

    /// Whether one that waits may go now. One that sends a body does not go before those that were not read yet: these may have
    /// nothing to ask.
    fn gives_way(&self) -> bool {
        let unread = self.held > self.heads + self.bodies + self.whole;
        self.heads > 0 || (self.bodies > 0 && !unread)
    }

    /// Takes the place of a waiting connection of the peer that has most of them: the one whose turn is first.
    fn push_out(&mut self) -> bool {
        let most = self.peers.iter_mut().max_by_key(|(_, of)| of.waiting.len());
        let Some((peer, of)) = most else { return false };
        let peer = *peer;
        let Some((turn, closed)) = of.waiting.pop_first() else { return false };
        let nothing = of.is_nothing();
        if nothing {
            self.peers.remove(&peer);
        }
        closed.notify_one();
        *self.count(turn.rest) -= 1;
        self.held = self.held.saturating_sub(1);
        self.closed.count(peer, Reason::Room);
        true
    }
}

impl Holding {
    fn is_nothing(&self) -> bool {
        self.waiting.is_empty() && self.asking == 0
    }
}

impl Closed {
    fn count(&mut self, peer: Peer, reason: Reason) {
        let known = self.of.len() < COUNTED_MAX || self.of.contains_key(&peer);
        let count = if known { self.of.entry(peer).or_default() } else { &mut self.others };
        match reason {
            Reason::Room => count.room += 1,
            Reason::Late => count.late += 1,
        }
    }

    fn report(self) -> Option<String> {
        let mut of: Vec<_> = self.of.into_iter().collect();
        of.sort_by_key(|(peer, count)| (u64::MAX - count.room - count.late, *peer));
        let rest = of.split_off(of.len().min(REPORTED_MAX));
        let rest = rest.iter().fold(self.others, |sum, (_, count)| Count {
            room: sum.room + count.room,
            late: sum.late + count.late,
        });
        let named = of.into_iter().map(|(peer, count)| (peer.to_string(), count));
        let parts: Vec<_> = named
            .chain([("others".to_owned(), rest)])
            .filter(|(_, count)| count.room + count.late > 0)
            .map(|(peer, Count { room, late })| format!("{peer}: {room} for newcomers, {late} too slow"))
            .collect();
        let list = parts.join("; ");
        (!list.is_empty()).then(|| format!("connections without a whole request were closed; {list}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Peer = Peer::User(1);
    const TWO: Peer = Peer::User(2);

    fn notify() -> Arc<Notify> {
        Arc::new(Notify::new())
    }

    /// Newcomers of that peer that wait for their first request.
    fn newcomers(places: &Places, peer: Peer, count: usize) -> Vec<Turn> {
        let newcomer = |_| {
            places.take();
            places.wait(peer, Rest::Head, &notify())
        };
        (0..count).map(newcomer).collect()
    }

    fn has_room(places: &Places) -> bool {
        *places.room.borrow()
    }

    #[test]
    fn the_longest_waiting_of_the_peer_with_most_gives_its_place() {
        let places = Places::new(5);
        let two = newcomers(&places, TWO, 2);
        let one = newcomers(&places, ONE, 3);
        newcomers(&places, ONE, 10);
        assert!(!places.go_on(ONE, one[2]), "its place is another's");
        assert!(places.go_on(TWO, two[0]) && places.go_on(TWO, two[1]), "who has less keeps all");
        assert_eq!(places.table().held, 5);
        let report = places.report().unwrap();
        assert!(report.ends_with("closed; uid 1: 10 for newcomers, 0 too slow"), "{report}");
        assert_eq!(places.report(), None);
    }

    #[test]
    fn one_that_sends_a_body_goes_after_its_peers_others_and_before_other_peers() {
        let places = Places::new(4);
        let body = |peer| {
            places.take();
            places.wait(peer, Rest::Body, &notify())
        };
        let bodies = [body(ONE), body(ONE)];
        let heads = [newcomers(&places, ONE, 1)[0], newcomers(&places, TWO, 1)[0]];
        places.take();
        assert!(!places.go_on(ONE, heads[0]), "it came last, and is first to go");
        places.take();
        assert!(!places.go_on(ONE, bodies[0]) && places.go_on(ONE, bodies[1]) && places.go_on(TWO, heads[1]));
    }

    #[test]
    fn there_is_no_room_where_all_have_requests() {
        let places = Places::new(2);
        let turns = newcomers(&places, ONE, 2);
        assert!(has_room(&places), "both wait");
        assert!(turns.iter().all(|turn| places.go_on(ONE, *turn)));
        turns.iter().for_each(|_| places.is_whole(true));
        assert!(!has_room(&places) && !places.push_out());
        places.is_whole(false);
        places.wait(ONE, Rest::Head, &notify());
        assert!(has_room(&places) && places.push_out() && has_room(&places));
        places.free();
        assert!(places.table().peers.is_empty());
    }

    #[test]
    fn a_connection_is_told_that_its_place_is_gone() {
        let places = Places::new(1);
        let told = notify();
        places.take();
        let turn = places.wait(ONE, Rest::Head, &told);
        places.take();
        let notified = std::pin::pin!(told.notified());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(notified.poll(&mut context).is_ready());
        assert!(!places.go_on(ONE, turn));
    }

    #[test]
    fn a_peer_asks_as_much_as_would_then_still_be_free() {
        let places = Places::new(16);
        let asked = |peer| (0..).take_while(|_| places.ask(peer, true).is_ok()).count();
        assert_eq!((asked(ONE), asked(TWO), asked(Peer::User(3))), (8, 4, 2));
        let full = places.ask(ONE, true);
        assert_eq!(full, Err(Full { own: 8, total: 16 }));
        assert_eq!(
            places.ask(Peer::Machine, false),
            Ok(()),
            "users of this machine have no bound of their own"
        );
        for _ in 0..8 {
            places.answered(ONE);
        }
        assert!(places.ask(TWO, true).is_ok() && places.ask(ONE, true).is_ok());
        // Whatever others have, one is allowed.
        let one = Places::new(1);
        assert!(one.ask(ONE, true).is_ok() && one.ask(ONE, true).is_err() && one.ask(TWO, true).is_ok());
    }

    #[test]
    fn a_report_names_few_and_counts_all() {
        let places = Places::new(1);
        for uid in 0..100 {
            (0..=uid).for_each(|_| places.late(Peer::User(uid)));
        }
        let report = places.report().unwrap();
        assert!(report.contains("; uid 63: 0 for newcomers, 64 too slow; uid 62: "), "{report}");
        let rest: u32 = (1..=100).sum::<u32>() - 64 - 63 - 62 - 61;
        assert!(report.ends_with(&format!("; others: 0 for newcomers, {rest} too slow")), "{report}");
    }
}
