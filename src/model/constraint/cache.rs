//! Compiled constraints that are kept, up to a bound of bytes. Each user has its own: the time of an answer would
//! tell otherwise that somebody else asked for such a form. Beyond the bound, the user whose constraints take most loses the
//! one that it has not used for longest. So a user with ever new forms has no other user's compiled again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use llguidance::TokenParser;
use sha2::{Digest, Sha256};

use super::ConstraintSource;
use crate::lock::{Mutex, Rank};

/// A user's constraint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    uid: u32,
    /// Of its kind and text.
    digest: [u8; 32],
}

/// Compiled constraints by user and digest.
pub(super) struct Cache {
    bytes_max: usize,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    entries: HashMap<Key, Entry>,
    bytes: usize,
    /// Counts uses.
    clock: u64,
}

struct Entry {
    /// Never used itself, so that it stays at the beginning of its answer.
    parser: Arc<TokenParser>,
    bytes: usize,
    used: u64,
}

impl Kept {
    /// The one, of the user whose constraints take most, that was not used for longest. Looks at all: some 10 us for 1,000.
    fn next_to_go(&self) -> Option<Key> {
        let mut bytes: BTreeMap<u32, usize> = BTreeMap::new();
        for (key, entry) in &self.entries {
            *bytes.entry(key.uid).or_default() += entry.bytes;
        }
        let (most, _) = bytes.into_iter().max_by_key(|(_, bytes)| *bytes)?;
        let own = self.entries.iter().filter(|(key, _)| key.uid == most);
        own.min_by_key(|(_, entry)| entry.used).map(|(key, _)| *key)
    }
}

impl Cache {
    pub fn new(bytes_max: usize) -> Self {
        Self { bytes_max, kept: Mutex::new(Rank::Constraints, Kept::default()) }
    }

    /// A constraint that is kept.
    pub fn get(&self, key: &Key) -> Option<Arc<TokenParser>> {
        let mut kept = self.kept.lock();
        kept.clock += 1;
        let clock = kept.clock;
        let entry = kept.entries.get_mut(key)?;
        entry.used = clock;
        Some(Arc::clone(&entry.parser))
    }

    /// Keeps a constraint of about that many bytes, if it is not larger than the bound.
    pub fn put(&self, key: Key, bytes: usize, parser: Arc<TokenParser>) {
        if bytes > self.bytes_max {
            return;
        }
        let mut kept = self.kept.lock();
        kept.clock += 1;
        let entry = Entry { parser, bytes, used: kept.clock };
        kept.bytes += bytes;
        if let Some(old) = kept.entries.insert(key, entry) {
            kept.bytes -= old.bytes;
        }
        while kept.bytes > self.bytes_max {
            match kept.next_to_go().and_then(|key| kept.entries.remove(&key)) {
                Some(entry) => kept.bytes -= entry.bytes,
                None => return,
            }
        }
    }

    /// Answers that follow a kept constraint.
    #[cfg(test)]
    pub fn followers(&self) -> usize {
        self.kept.lock().entries.values().map(|entry| Arc::strong_count(&entry.parser) - 1).sum()
    }

    /// Number of constraints and their bytes.
    #[cfg(test)]
    pub fn size(&self) -> (usize, usize) {
        let kept = self.kept.lock();
        (kept.entries.len(), kept.bytes)
    }
}

/// The key of a user's constraint. A text of 64 KiB takes some 0.1 ms.
pub(super) fn key(source: &ConstraintSource, uid: u32) -> Key {
    let mut digest = Sha256::new();
    digest.update([source.kind as u8]);
    digest.update(source.text.as_bytes());
    Key { uid, digest: digest.finalize().into() }
}
