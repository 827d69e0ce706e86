//! Constraints that are being compiled: of those who ask for the same one, the first compiles it and the others wait.
//!
//! Programs that start together ask for one form together. Each for itself, they took all threads that compile.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::ConstraintError;
use super::cache::Key;
use crate::lock::{Condvar, Mutex, Rank};

/// Why the constraint cannot be used; `None` if it can.
type Outcome = OnceLock<Option<ConstraintError>>;

/// Constraints that are being compiled, by the digest of their texts.
pub(super) struct Flights {
    underway: Mutex<HashMap<Key, Arc<Outcome>>>,
    landed: Condvar,
}

/// One that is being compiled. It ends when this drops.
pub(super) struct Flight {
    flights: Arc<Flights>,
    key: Key,
    outcome: Arc<Outcome>,
}

/// The part of one who asks for a constraint.
pub(super) enum Turn {
    /// To compile it.
    Lead(Flight),
    /// Another one has compiled it: it is kept, unless it is too large, or nobody could compile it now.
    Landed,
    /// Another one found that it cannot be used.
    Failed(ConstraintError),
    /// Another one still compiles it.
    Late,
}

impl Flights {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { underway: Mutex::new(Rank::Compiling, HashMap::new()), landed: Condvar::new() })
    }

    /// Begins to compile, or waits for another one who does.
    pub fn join(self: &Arc<Self>, key: Key, until: Instant) -> Turn {
        let mut underway = self.underway.lock();
        let outcome = match underway.entry(key) {
            Entry::Occupied(entry) => Arc::clone(entry.get()),
            Entry::Vacant(entry) => {
                let outcome = Arc::clone(entry.insert(Arc::default()));
                return Turn::Lead(Flight { flights: Arc::clone(self), key, outcome });
            }
        };
        while underway.get(&key).is_some_and(|other| Arc::ptr_eq(other, &outcome)) {
            if self.landed.wait_until(&mut underway, until) {
                return Turn::Late;
            }
        }
        outcome.get().cloned().flatten().map_or(Turn::Landed, Turn::Failed)
    }
}

impl Flight {
    /// Tells those who wait.
    pub fn land(self, failed: Option<&ConstraintError>) {
        let _ = self.outcome.set(failed.cloned());
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.flights.underway.lock().remove(&self.key);
        self.flights.landed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::{ConstraintKind, ConstraintSource, cache};
    use super::*;
    use crate::lock;

    fn key(of: u8) -> Key {
        cache::key(&ConstraintSource { kind: ConstraintKind::Regex, text: of.to_string() }, 0)
    }

    #[test]
    fn one_leads_and_the_others_hear_how_it_ended() {
        let flights = Flights::new();
        let soon = || lock::now() + Duration::from_secs(20);
        let Turn::Lead(first) = flights.join(key(1), soon()) else { panic!("nobody else compiles") };
        assert!(matches!(flights.join(key(2), soon()), Turn::Lead(_)), "another constraint");
        assert!(matches!(flights.join(key(1), lock::now()), Turn::Late));
        let waiting: Vec<_> = (0..4)
            .map(|_| {
                let flights = Arc::clone(&flights);
                std::thread::spawn(move || flights.join(key(1), lock::now() + Duration::from_secs(20)))
            })
            .collect();
        // The map, the flight and each waiter hold the outcome.
        let by = lock::now() + Duration::from_secs(20);
        while Arc::strong_count(&first.outcome) < 2 + waiting.len() {
            assert!(lock::now() < by, "they wait");
            std::thread::yield_now();
        }
        let error = ConstraintError::Internal("broken".to_owned());
        first.land(Some(&error));
        for waiter in waiting {
            let Turn::Failed(heard) = waiter.join().unwrap() else { panic!("nobody told it") };
            assert_eq!(heard, error);
        }
        let Turn::Lead(second) = flights.join(key(1), soon()) else { panic!("it ended") };
        drop(second); // its user may not compile now
        assert!(flights.underway.lock().is_empty());
    }
}
