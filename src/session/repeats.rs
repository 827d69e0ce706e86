//! Repeats of requests: the last requests of each uid by number, so that a repeat does not run twice.
//!
//! A client that lost its connection sends the request again with the same number and gets the first answer. If the
//! first request still runs, the repeat waits for it. Each such request is also harmless to repeat: forgetting one (a
//! restart, too many uids) costs only time.

use std::collections::{HashMap, VecDeque};
use std::hash::Hasher;

use tokio::sync::watch;

/// Requests remembered for each uid.
const REQUESTS_MAX: usize = 1024;

/// Most remembered uids; the oldest is dropped first.
const UIDS_MAX: usize = 256;

/// Requests by uid and number.
#[derive(Debug, Default)]
pub struct Repeats {
    uids: HashMap<u32, Remembered>,
    arrivals: VecDeque<u32>,
}

#[derive(Debug, Default)]
struct Remembered {
    requests: HashMap<u128, Repeatable>,
    arrivals: VecDeque<u128>,
}

#[derive(Clone, Debug)]
struct Repeatable {
    /// Hash of op and payload: a client that makes two requests collide only confuses itself.
    fingerprint: u64,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    /// The channel closes when the request ends.
    Running(watch::Receiver<()>),
    Replied(Vec<u8>),
}

/// State of a request number.
#[derive(Debug)]
pub enum Recall {
    /// Unknown number: it now counts as running, until the sender drops.
    New(watch::Sender<()>),
    /// The same request runs: recall again when the sender is gone.
    Running(watch::Receiver<()>),
    /// The same request was answered with these bytes.
    Answered(Vec<u8>),
    /// The number belongs to another request.
    Conflict,
}

impl Repeats {
    /// Looks up `id`, which stands for `request` (op and payload), and marks a new one as running. 0 means no number:
    /// it is always new.
    pub fn recall(&mut self, uid: u32, id: u128, request: &[u8]) -> Recall {
        if id != 0
            && let Some(known) = self.uids.get(&uid).and_then(|known| known.requests.get(&id))
        {
            return match &known.state {
                _ if known.fingerprint != fingerprint(request) => Recall::Conflict,
                State::Running(end) => Recall::Running(end.clone()),
                State::Replied(reply) => Recall::Answered(reply.clone()),
            };
        }
        let (sender, end) = watch::channel(());
        self.keep(uid, id, request, State::Running(end));
        Recall::New(sender)
    }

    /// Keeps an answer.
    pub fn remember(&mut self, uid: u32, id: u128, request: &[u8], reply: Vec<u8>) {
        self.keep(uid, id, request, State::Replied(reply));
    }

    /// Forgets a request that ended without an answer to keep.
    pub fn forget_running(&mut self, uid: u32, id: u128) {
        if let Some(known) = self.uids.get_mut(&uid)
            && let Some(Repeatable { state: State::Running(_), .. }) = known.requests.get(&id)
        {
            known.requests.remove(&id);
            known.arrivals.retain(|other| *other != id);
        }
    }

    fn keep(&mut self, uid: u32, id: u128, request: &[u8], state: State) {
        if id == 0 {
            return;
        }
        if !self.uids.contains_key(&uid) {
            if self.arrivals.len() >= UIDS_MAX
                && let Some(first) = self.arrivals.pop_front()
            {
                self.uids.remove(&first);
            }
            self.arrivals.push_back(uid);
        }
        let known = self.uids.entry(uid).or_default();
        if known.requests.insert(id, Repeatable { fingerprint: fingerprint(request), state }).is_none() {
            known.arrivals.push_back(id);
        }
        if known.arrivals.len() > REQUESTS_MAX
            && let Some(first) = known.arrivals.pop_front()
        {
            known.requests.remove(&first);
        }
    }
}

fn fingerprint(request: &[u8]) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    hasher.write(request);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_new(recall: &Recall) -> bool {
        matches!(recall, Recall::New(_))
    }

    fn answer(recall: Recall) -> Vec<u8> {
        match recall {
            Recall::Answered(reply) => reply,
            other => unreachable!("{other:?}"),
        }
    }

    #[test]
    fn a_repeat_gets_the_first_answer_and_another_request_does_not() {
        let mut repeats = Repeats::default();
        assert!(is_new(&repeats.recall(1, 7, b"load")));
        repeats.remember(1, 7, b"load", b"done".into());
        assert_eq!(answer(repeats.recall(1, 7, b"load")), b"done");
        assert!(matches!(repeats.recall(1, 7, b"unload"), Recall::Conflict));
        assert!(is_new(&repeats.recall(2, 7, b"load")), "another uid's numbers are its own");
        repeats.remember(1, 0, b"load", b"done".into());
        assert!(is_new(&repeats.recall(1, 0, b"load")), "0 means no number");
        assert!(is_new(&repeats.recall(1, 0, b"load")));
    }

    #[test]
    fn a_repeat_of_what_runs_waits_for_its_end() {
        let mut repeats = Repeats::default();
        let Recall::New(running) = repeats.recall(1, 7, b"load") else { unreachable!() };
        let Recall::Running(end) = repeats.recall(1, 7, b"load") else { unreachable!("it runs") };
        assert!(end.has_changed().is_ok(), "not ended");
        assert!(matches!(repeats.recall(1, 7, b"unload"), Recall::Conflict));
        repeats.forget_running(1, 7);
        drop(running);
        assert!(end.has_changed().is_err(), "ended");
        assert!(is_new(&repeats.recall(1, 7, b"load")), "the first one failed: the repeat runs");
        repeats.remember(1, 7, b"load", b"done".into());
        repeats.forget_running(1, 7);
        assert_eq!(answer(repeats.recall(1, 7, b"load")), b"done");
        assert_eq!(repeats.uids[&1].arrivals.len(), 1);
    }

    #[test]
    fn both_bounds_hold() {
        let mut repeats = Repeats::default();
        for id in 1..=REQUESTS_MAX as u128 + 1 {
            repeats.remember(1, id, b"", vec![]);
        }
        assert!(!is_new(&repeats.recall(1, 2, b"")));
        assert!(is_new(&repeats.recall(1, 1, b"")), "the first is forgotten");
        for uid in 2..=UIDS_MAX as u32 + 1 {
            repeats.remember(uid, 1, b"", vec![]);
        }
        assert!(is_new(&repeats.recall(1, 3, b"")));
        assert_eq!((repeats.uids.len(), repeats.arrivals.len()), (UIDS_MAX, UIDS_MAX));
    }
}
