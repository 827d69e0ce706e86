//! Requests that must not be done twice: the last ones of each uid, by the number the client gave them.
//!
//! A client that lost its connection sends the request again with the same number and gets the first answer. Every such
//! request is harmless to repeat besides, so forgetting (a restart, too many uids) costs nothing but time.

use std::collections::{HashMap, VecDeque};
use std::hash::Hasher;

/// Requests remembered for a uid.
const REQUESTS_MAX: usize = 1024;

/// Uids remembered; the one that came first goes first.
const UIDS_MAX: usize = 256;

/// The answers given, by uid and request number.
#[derive(Debug, Default)]
pub struct RequestMemory {
    uids: HashMap<u32, Remembered>,
    arrivals: VecDeque<u32>,
}

#[derive(Debug, Default)]
struct Remembered {
    answers: HashMap<u128, Answer>,
    arrivals: VecDeque<u128>,
}

#[derive(Clone, Debug)]
struct Answer {
    /// Of op and payload: a client that makes two requests collide only confuses itself.
    fingerprint: u64,
    reply: Vec<u8>,
}

/// What is known of a request number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recall {
    /// Nothing.
    New,
    /// The same request was answered with this.
    Answered(Vec<u8>),
    /// Another request had this number.
    Conflict,
}

impl RequestMemory {
    /// What is known of `id`, which stands for `request` (op and payload). 0 is no number.
    pub fn recall(&self, uid: u32, id: u128, request: &[u8]) -> Recall {
        match self.uids.get(&uid).and_then(|known| known.answers.get(&id)) {
            _ if id == 0 => Recall::New,
            None => Recall::New,
            Some(answer) if answer.fingerprint == fingerprint(request) => {
                Recall::Answered(answer.reply.clone())
            }
            Some(_) => Recall::Conflict,
        }
    }

    /// Keeps an answer.
    pub fn remember(&mut self, uid: u32, id: u128, request: &[u8], reply: Vec<u8>) {
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
        if known.answers.insert(id, Answer { fingerprint: fingerprint(request), reply }).is_none() {
            known.arrivals.push_back(id);
        }
        if known.arrivals.len() > REQUESTS_MAX
            && let Some(first) = known.arrivals.pop_front()
        {
            known.answers.remove(&first);
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

    #[test]
    fn a_repeat_gets_the_first_answer_and_another_request_does_not() {
        let mut memory = RequestMemory::default();
        assert_eq!(memory.recall(1, 7, b"load"), Recall::New);
        memory.remember(1, 7, b"load", b"done".into());
        assert_eq!(memory.recall(1, 7, b"load"), Recall::Answered(b"done".into()));
        assert_eq!(memory.recall(1, 7, b"unload"), Recall::Conflict);
        assert_eq!(memory.recall(2, 7, b"load"), Recall::New, "another uid's numbers are its own");
        memory.remember(1, 0, b"load", b"done".into());
        assert_eq!(memory.recall(1, 0, b"load"), Recall::New, "0 is no number");
    }

    #[test]
    fn both_bounds_hold() {
        let mut memory = RequestMemory::default();
        for id in 1..=REQUESTS_MAX as u128 + 1 {
            memory.remember(1, id, b"", vec![]);
        }
        assert_eq!(memory.recall(1, 1, b""), Recall::New, "the first is forgotten");
        assert_ne!(memory.recall(1, 2, b""), Recall::New);
        for uid in 2..=UIDS_MAX as u32 + 1 {
            memory.remember(uid, 1, b"", vec![]);
        }
        assert_eq!(memory.recall(1, 2, b""), Recall::New);
        assert_eq!((memory.uids.len(), memory.arrivals.len()), (UIDS_MAX, UIDS_MAX));
    }
}
