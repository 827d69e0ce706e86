//! Decides which waiting sequence gets a place and KV bytes, and which sequence gives its own up for it.
//!
//! A sequence is admitted when the pages of its known tokens, and of a few more, fit beside those of the others. Nobody knows
//! its later need: many answers end long before the context is full.
//!
//! - The user with the fewest places is served first; of several, the one with the least device time. Among equals, the one
//!   that was admitted longest ago is. A user that comes and goes is not new each time: its time is remembered (`accounts`).
//! - Of a user, sequences of the highest priority are served first. Of these, the connection with the fewest places is,
//!   then that with the least device time; its sequences in order of arrival. A sequence that does not fit blocks others of
//!   the same user only.
//! - A user may hold all places and bytes while nobody else wants them. A user below its equal share takes the lack
//!   from the user that holds most above its own.
//! - A user holds at most a configured part of the bytes, also while nobody else wants them.
//! - A sequence takes the place of one of the same user with a lower priority.
//! - A connection takes a place from another one of the same user that has at least two more.
//! - A sequence that was without credit for [`YIELD`] gives way to any sequence that waits.
//! - A user without a place that waited for [`PATIENCE`], because it needs more than its share, takes turns with the
//!   others. A privileged user waits for nobody.
//!
//! A sequence that gives its place up is parked: it waits in order of arrival again and prefills its known tokens when
//! its turn comes. Its tokens do not depend on that.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::Schedule;
use crate::scheduler::SequenceId;
use crate::scheduler::sequence::{Request, STATES, Sequence};

/// A sequence without credit for this long gives way to others.
pub(super) const YIELD: Duration = Duration::from_secs(1);
/// A user that needs more than its share waits this long before it takes a turn.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// The first waiting sequence of each user is looked for in the whole queue, that of each connection among so many.
const LOOKED_AT: usize = 512;
/// Longest time that a sequence keeps its place from a user that waits for a turn.
const PROTECTED_MAX: Duration = Duration::from_secs(30);

/// Result of [`Schedule::admit`].
#[derive(Debug, Default)]
pub(in crate::scheduler) struct Admission {
    pub admitted: Vec<SequenceId>,
    /// Sequences that gave their place up.
    pub parked: Vec<SequenceId>,
}

/// Places and KV bytes of one user.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    pub places: u64,
    pub bytes: u64,
}

/// Places and bytes that a waiting sequence lacks.
#[derive(Clone, Copy, Debug)]
struct Lack {
    places: u64,
    bytes: u64,
    /// Bytes above the most that its user may hold.
    of_user: u64,
}

/// The waiting sequence of a user that is served first.
struct Head<'a, A> {
    /// Index in the queue of the user's first sequence, whatever the priorities.
    first: usize,
    /// That of this one.
    at: usize,
    sequence: &'a Sequence<A>,
}

impl<A> Schedule<A> {
    /// Admits all sequences that fit, or for which others give way.
    pub fn admit(&mut self, now: Instant) -> Admission {
        let mut admission = Admission::default();
        if self.running.is_empty() {
            self.kv.set_room(None);
        }
        while let Some((at, victims)) = self.next_admission(now).or_else(|| self.admission_for_drafters(now))
        {
            let Some(sequence) = self.dequeue(at) else { break };
            for id in victims {
                admission.parked.extend(self.park(id, now));
            }
            admission.admitted.push(sequence.request.id);
            self.enter(sequence, now);
        }
        admission
    }

    /// The next admission once draft models have no pages; `None` if they have none now.
    fn admission_for_drafters(&mut self, now: Instant) -> Option<(usize, Vec<SequenceId>)> {
        let waits = !self.queue.is_empty() && self.release_drafters(None);
        waits.then(|| self.next_admission(now)).flatten()
    }

    fn enter(&mut self, mut sequence: Sequence<A>, now: Instant) {
        self.kv.open(sequence.request.model, sequence.request.page_bytes);
        if let Some(drafter) = &sequence.drafter {
            self.kv.open(drafter.model, drafter.page_bytes);
        }
        self.kv.open_states(sequence.request.model, sequence.request.state_bytes);
        sequence.stalled = (sequence.credit == 0).then_some(now);
        sequence.first_admitted.get_or_insert(now);
        (sequence.admitted, sequence.queued) = (Some(now), None);
        let last = self.admissions.values().max().copied().unwrap_or(0);
        self.admissions.insert(sequence.request.uid, last + 1);
        self.running.push(sequence);
        self.attach(self.running.len() - 1);
    }

    /// Returns an admitted sequence to the queue, at its place in the order of arrival.
    pub(super) fn park(&mut self, id: SequenceId, now: Instant) -> Option<SequenceId> {
        let at = self.running.iter().position(|s| s.request.id == id)?;
        let mut sequence = self.take_running(at);
        sequence.restart();
        self.kv.watch_evictions(self.limits.swaps);
        (sequence.admitted, sequence.queued) = (None, Some(now));
        self.enqueue(sequence);
        Some(id)
    }

    /// The next sequence to admit, by its index in the queue, and the sequences to park for it.
    fn next_admission(&self, now: Instant) -> Option<(usize, Vec<SequenceId>)> {
        let held = self.held();
        let mut heads = self.heads();
        let places = |uid: u32| held.get(&uid).map_or(0, |held| held.places);
        let order = |head: &Head<'_, A>| {
            let uid = head.sequence.request.uid;
            let admitted = self.admissions.get(&uid).copied();
            (!self.is_privileged(uid), places(uid), self.uses.of(uid), admitted, head.first)
        };
        heads.sort_by_key(order);
        heads.into_iter().find_map(|head| Some((head.at, self.victims(head.sequence, &held, now)?)))
    }

    /// The waiting sequence of each user that is served first.
    fn heads(&self) -> Vec<Head<'_, A>> {
        let connections: usize = self.waiting.values().map(BTreeMap::len).sum();
        let mut held: BTreeMap<(u32, u64), u64> = BTreeMap::new();
        for sequence in &self.running {
            *held.entry((sequence.request.uid, sequence.request.connection)).or_default() += 1;
        }
        let mut seen = BTreeSet::new();
        let mut heads: BTreeMap<u32, (_, Head<'_, A>)> = BTreeMap::new();
        // The greatest priority of each user that has several: it may wait behind all others. From LOOKED_AT on it is only
        // looked for until it is found.
        let several = self.priorities.iter().filter(|(_, of_user)| of_user.len() > 1);
        let mut greatest: BTreeMap<u32, u8> =
            several.filter_map(|(uid, of_user)| Some((*uid, *of_user.last_key_value()?.0))).collect();
        for (at, sequence) in self.queue.iter().enumerate() {
            let all_seen = seen.len() == connections || at >= LOOKED_AT;
            let others_done = heads.len() == self.waiting.len() && all_seen;
            if at == LOOKED_AT {
                let lacks = |uid: &u32, most: u8| {
                    let head: Option<&(_, Head<'_, A>)> = heads.get(uid);
                    head.is_none_or(|(_, head)| head.sequence.request.priority < most)
                };
                greatest.retain(|uid, most| lacks(uid, *most));
            }
            if others_done && greatest.is_empty() {
                break;
            }
            let wanted = greatest.get(&sequence.request.uid).copied();
            if others_done && wanted.is_none() {
                continue;
            }
            // A parked sequence without credit has nothing to do with a place.
            let idle = sequence.stalled.is_some() && sequence.credit == 0;
            let Request { uid, connection, priority, .. } = sequence.request;
            let of_head = heads.get(&uid).map(|(_, head)| head.sequence.request.priority);
            let may_lead = wanted.is_some() && of_head.is_some_and(|of_head| priority >= of_head);
            if idle || !(seen.insert((uid, connection)) || may_lead) {
                continue;
            }
            let places = held.get(&(uid, connection)).copied().unwrap_or(0);
            let place = (Reverse(priority), places, self.time_of_connection(&sequence.request), at);
            let (best, head) = heads.entry(uid).or_insert((place, Head { first: at, at, sequence }));
            if place < *best {
                *best = place;
                (head.at, head.sequence) = (at, sequence);
            }
            if at >= LOOKED_AT && wanted == Some(priority) {
                greatest.remove(&uid);
            }
        }
        heads.into_values().map(|(_, head)| head).collect()
    }

    /// The sequences to park so that `head` fits: none if it fits already, `None` if it must wait.
    fn victims(
        &self,
        head: &Sequence<A>,
        held: &BTreeMap<u32, Held>,
        now: Instant,
    ) -> Option<Vec<SequenceId>> {
        let mut held = held.clone();
        let mut victims = Vec::new();
        let (mut places, mut bytes) = (self.running.len() as u64, self.claimed_bytes());
        // Its need beside pages that any sequence holds, and beside those that its user's sequences hold.
        let (mut need, room) = ([head.claimed_bytes(); 2], self.kv.room_bytes());
        let (mut own, most) = (self.claimed_by(head.request.uid), self.limits.kv_user_bytes);
        if bytes.saturating_add(need[0]) > room || own.saturating_add(need[1]) > most {
            let Request { model, uid, page_bytes, .. } = head.request;
            let shared = self.kv.shared_pages(model, uid, &head.tokens);
            let bytes = shared.map(|pages| u64::from(pages).saturating_mul(page_bytes));
            need = [0, 1].map(|of| need[of].saturating_sub(bytes[of]));
        }
        loop {
            let lack = Lack {
                places: (places + 1).saturating_sub(u64::from(self.limits.sequences_max)),
                bytes: bytes.saturating_add(need[0]).saturating_sub(room),
                of_user: own.saturating_add(need[1]).saturating_sub(most),
            };
            if (lack.places, lack.bytes, lack.of_user) == (0, 0, 0) {
                return Some(victims);
            }
            let victim = self.next_victim(head, &held, lack, &victims, now)?;
            victims.push(victim.request.id);
            places -= 1;
            let [freed, freed_of_user] = self.freed_bytes(victim);
            bytes = bytes.saturating_sub(freed);
            if victim.request.uid == head.request.uid {
                own = own.saturating_sub(freed_of_user);
            }
            if let Some(held) = held.get_mut(&victim.request.uid) {
                held.places -= 1;
                held.bytes = held.bytes.saturating_sub(victim.claimed_bytes());
            }
        }
    }

    /// Bytes that an admitted sequence claims and no other one holds, and those that no other one of its user does.
    fn freed_bytes(&self, sequence: &Sequence<A>) -> [u64; 2] {
        let Request { model, uid, page_bytes, state_bytes, .. } = sequence.request;
        let outstanding = sequence.claimed_pages() - sequence.kv.pages.len() as u32;
        let own = self.kv.own_pages(model, uid, &sequence.kv);
        let states = state_bytes.saturating_mul(STATES);
        own.map(|pages| u64::from(pages + outstanding).saturating_mul(page_bytes).saturating_add(states))
    }

    fn next_victim(
        &self,
        head: &Sequence<A>,
        held: &BTreeMap<u32, Held>,
        lack: Lack,
        parked: &[SequenceId],
        now: Instant,
    ) -> Option<&Sequence<A>> {
        let of_user = |s: &Sequence<A>| lack.of_user == 0 || s.request.uid == head.request.uid;
        let left = || self.running.iter().filter(|s| !parked.contains(&s.request.id)).filter(|s| of_user(s));
        if let Some(stalled) = left().filter(|s| s.gives_way(now)).min_by_key(|s| s.stalled) {
            return Some(stalled);
        }
        let (uid, share) = (head.request.uid, self.share());
        let own = held.get(&uid).copied().unwrap_or_default();
        let privileged = self.is_privileged(uid);
        let within =
            own.places < share.places && own.bytes.saturating_add(head.claimed_bytes()) <= share.bytes;
        let since = head.queued.map(|since| now.saturating_duration_since(since));
        let urgent = privileged || own.places == 0 && since.is_some_and(|waited| waited >= PATIENCE);
        // The user among `left` that holds most above `least`, and its latest sequence: that one loses the least.
        let latest = |least: Held, may: &dyn Fn(&Sequence<A>) -> bool| {
            let amount = |uid: u32| {
                let held = held.get(&uid).copied().unwrap_or_default();
                let above = [(lack.bytes, held.bytes, least.bytes), (lack.places, held.places, least.places)];
                above.into_iter().find(|(lack, ..)| *lack > 0).filter(|(_, has, least)| has > least)
            };
            let others = left().filter(|s| s.request.uid != uid && may(s));
            let others = others.filter(|s| privileged || !self.is_privileged(s.request.uid));
            let above = others.filter_map(|s| Some((amount(s.request.uid)?.1, s.admitted, s)));
            let (.., last) = above.max_by_key(|(amount, admitted, _)| (*amount, *admitted))?;
            // Priorities say which of its user's, not which user's.
            let of_user = left().filter(|s| s.request.uid == last.request.uid && may(s));
            of_user.max_by_key(|s| (Reverse(s.request.priority), s.admitted))
        };
        let over = (within || privileged).then(|| latest(share, &|_| true)).flatten();
        let turn = || latest(Held::default(), &|s| privileged || !s.is_protected(now));
        over.or_else(|| self.own_victim(head, parked)).or_else(|| urgent.then(turn).flatten())
    }

    /// The latest sequence of the same user's lowest priority, if that is below the one of `head`. Else the latest of the
    /// connection that has most places, if it has at least two more than the connection of `head`. With one more, the two
    /// would take it from each other for ever.
    fn own_victim(&self, head: &Sequence<A>, parked: &[SequenceId]) -> Option<&Sequence<A>> {
        let of_user = |s: &&Sequence<A>| s.request.uid == head.request.uid && !parked.contains(&s.request.id);
        let lower =
            self.running.iter().filter(of_user).filter(|s| s.request.priority < head.request.priority);
        if let Some(lowest) = lower.max_by_key(|s| (Reverse(s.request.priority), s.admitted)) {
            return Some(lowest);
        }
        let own = |s: &&Sequence<A>| of_user(s) && s.request.priority == head.request.priority;
        let mut places: BTreeMap<u64, u64> = BTreeMap::new();
        for sequence in self.running.iter().filter(own) {
            *places.entry(sequence.request.connection).or_default() += 1;
        }
        let few = places.get(&head.request.connection).copied().unwrap_or(0);
        let (connection, most) = places.into_iter().max_by_key(|(_, places)| *places)?;
        let of_most = |s: &&Sequence<A>| own(s) && s.request.connection == connection;
        (most >= few + 2).then(|| self.running.iter().filter(of_most).max_by_key(|s| s.admitted)).flatten()
    }

    /// Places and bytes by user.
    pub(super) fn held(&self) -> BTreeMap<u32, Held> {
        let mut held: BTreeMap<u32, Held> = BTreeMap::new();
        for sequence in &self.running {
            let user = held.entry(sequence.request.uid).or_default();
            user.places += 1;
            user.bytes = user.bytes.saturating_add(sequence.claimed_bytes());
        }
        held
    }

    /// KV bytes that a user's admitted sequences have, each page counted once, and are to have soon.
    pub(super) fn claimed_by(&self, uid: u32) -> u64 {
        let own = self.running.iter().filter(|s| s.request.uid == uid);
        own.map(|s| s.outstanding_bytes()).fold(self.kv.held_by(uid), u64::saturating_add)
    }

    /// Equal share of each user with a live sequence.
    fn share(&self) -> Held {
        let users = (self.users().len() as u64).max(1);
        Held {
            places: (u64::from(self.limits.sequences_max) / users).max(1),
            bytes: self.limits.kv_budget_bytes / users,
        }
    }

    pub(super) fn is_privileged(&self, uid: u32) -> bool {
        self.limits.privileged.contains(&uid)
    }

    /// The next instant after `now` at which a waiting sequence may take another's place.
    pub fn next_admission_change(&self, now: Instant) -> Option<Instant> {
        let stalled = self.running.iter().filter_map(|s| s.stalled?.checked_add(YIELD));
        let patient = self.queue.iter().filter_map(|s| s.queued?.checked_add(PATIENCE));
        let waits = !self.queue.is_empty();
        stalled.chain(patient).filter(|moment| waits && *moment > now).min()
    }
}

impl<A> Sequence<A> {
    /// True if it had no credit for so long that it gives way to all others.
    pub(super) fn gives_way(&self, now: Instant) -> bool {
        let long = |since| now.saturating_duration_since(since) >= YIELD;
        self.credit == 0 && self.stalled.is_some_and(long)
    }

    /// True while a waiting user may not take the sequence's place. It lasts until the sequence has decoded as long as it
    /// prefilled. So a restart does not cost most of its time.
    fn is_protected(&self, now: Instant) -> bool {
        let Some(admitted) = self.admitted else { return false };
        let since = |moment: Instant| now.saturating_duration_since(moment);
        let keeps = match self.ready {
            None => true,
            Some(ready) => since(ready) < YIELD.max(ready.saturating_duration_since(admitted)),
        };
        keeps && since(admitted) < PROTECTED_MAX
    }
}
