//! Answers that later requests go on with. Each caller has its own, and the oldest leave first.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::access::Identity;

/// Most answers that are kept of one caller.
const COUNT_MAX: usize = 1024;

/// Most bytes of all answers. A caller may hold them all until another one wants room.
const BYTES_MAX: usize = 64 << 20;

/// Most bytes of one answer and its conversation: the daemon takes no conversation of more than 1 MiB.
pub const ENTRY_BYTES_MAX: usize = 4 << 20;

/// Bytes of an entry beside its texts.
const ENTRY_BYTES: usize = 512;

/// An answer.
#[derive(Debug, PartialEq, Eq)]
pub struct Entry {
    /// The answer as its API writes it.
    pub answer: String,
    /// The conversation up to its end, a JSON list of the API's items.
    pub items: String,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.answer.len() + self.items.len() + ENTRY_BYTES
    }
}

/// The answers of all callers.
#[derive(Debug, Default)]
pub struct Kept(Mutex<Callers>);

#[derive(Debug, Default)]
struct Callers {
    callers: HashMap<Identity, Own>,
    bytes: usize,
}

/// The answers of one caller, the oldest first.
#[derive(Debug, Default)]
struct Own {
    entries: VecDeque<(u128, Arc<Entry>)>,
    bytes: usize,
}

impl Kept {
    /// Keeps an answer. Answers of more than [`ENTRY_BYTES_MAX`] are not kept. The oldest answers of the caller that holds most
    /// give way to it.
    pub fn put(&self, caller: Identity, id: u128, entry: Entry) {
        let bytes = entry.bytes();
        if bytes > ENTRY_BYTES_MAX {
            return;
        }
        let mut all = self.lock();
        let own = all.callers.entry(caller).or_default();
        own.entries.push_back((id, Arc::new(entry)));
        own.bytes += bytes;
        let crowded = own.entries.len() > COUNT_MAX;
        all.bytes += bytes;
        if crowded {
            all.drop_oldest(caller);
        }
        while all.bytes > BYTES_MAX {
            let Some(most) = all.callers.iter().max_by_key(|(_, own)| own.bytes).map(|(caller, _)| *caller)
            else {
                return;
            };
            all.drop_oldest(most);
        }
    }

    /// The caller's answer of that number.
    pub fn get(&self, caller: Identity, id: u128) -> Option<Arc<Entry>> {
        let all = self.lock();
        let own = all.callers.get(&caller)?;
        own.entries.iter().rev().find(|(of, _)| *of == id).map(|(_, entry)| Arc::clone(entry))
    }

    /// Drops the caller's answer of that number; false if there is none.
    pub fn remove(&self, caller: Identity, id: u128) -> bool {
        let mut all = self.lock();
        let found = all.callers.get(&caller).and_then(|own| own.entries.iter().position(|(of, _)| *of == id));
        if let Some(at) = found {
            all.drop_at(caller, at);
        }
        found.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Callers> {
        // Each change is whole before anything that could panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Callers {
    fn drop_oldest(&mut self, caller: Identity) {
        self.drop_at(caller, 0);
    }

    fn drop_at(&mut self, caller: Identity, at: usize) {
        let Some(own) = self.callers.get_mut(&caller) else { return };
        if let Some((_, entry)) = own.entries.remove(at) {
            own.bytes -= entry.bytes();
            self.bytes -= entry.bytes();
        }
        if own.entries.is_empty() {
            self.callers.remove(&caller);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // tests fail by panicking

    use super::*;

    const A: Identity = Identity::of_test(1);
    const B: Identity = Identity::of_test(2);

    fn entry(bytes: usize) -> Entry {
        Entry { answer: "x".repeat(bytes - ENTRY_BYTES), items: String::new() }
    }

    #[test]
    fn a_caller_gets_and_drops_its_own_answers_alone() {
        let kept = Kept::default();
        kept.put(A, 7, entry(600));
        assert_eq!(kept.get(A, 7).unwrap().answer.len(), 600 - ENTRY_BYTES);
        assert!(kept.get(B, 7).is_none() && kept.get(A, 8).is_none());
        assert!(!kept.remove(B, 7) && kept.remove(A, 7) && !kept.remove(A, 7));
        let all = kept.lock();
        assert_eq!((all.bytes, all.callers.len()), (0, 0));
    }

    #[test]
    fn the_oldest_leaves_when_there_are_too_many() {
        let kept = Kept::default();
        for id in 0..=COUNT_MAX as u128 {
            kept.put(A, id, entry(600));
        }
        assert!(kept.get(A, 0).is_none() && kept.get(A, 1).is_some());
        assert!(kept.get(A, COUNT_MAX as u128).is_some());
        assert_eq!(kept.lock().bytes, 600 * COUNT_MAX);
    }

    #[test]
    fn whoever_holds_most_makes_room() {
        let kept = Kept::default();
        kept.put(B, 1000, entry(1 << 20));
        for id in 0..100 {
            kept.put(A, id, entry(1 << 20));
        }
        assert!(kept.get(B, 1000).is_some(), "another caller's many answers take nothing of B's");
        assert!(kept.get(A, 36).is_none() && kept.get(A, 37).is_some());
        assert_eq!(kept.lock().bytes, BYTES_MAX);
        kept.put(B, 1001, entry(ENTRY_BYTES_MAX + 1));
        assert!(kept.get(B, 1001).is_none() && kept.get(B, 1000).is_some());
    }
}
