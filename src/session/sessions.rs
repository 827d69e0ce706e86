//! The table of sessions: tokens or chat messages that a user's later requests go on with.
//!
//! Only tokens and messages are here. Their keys and values are known prefixes of the engine, which come and go without
//! the sessions. A request that uses a session has it alone, and changes it at its successful end or not at all.
//!
//! A user's sessions have a bound of their own, and all users share a total ([`Shares`]). When a user's session needs room,
//! the least recently used one of the same user that no request uses is forgotten.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_client::wire::limits::SESSIONS_MAX;

use crate::lock::{Mutex, Rank};
use crate::prefixes::sessions::{Content, KeptSession};
use crate::share::{Charge, Refusal, Shares, Taker};

/// Most bytes of all sessions together, and of those of one user.
const BYTES_MAX: u64 = 64 << 20;
const BYTES_MAX_OF_UID: u64 = 4 << 20;

/// Bytes that a session takes besides its texts and tokens, and a message besides its texts. Larger than in the file.
const SESSION_BYTES: usize = 256;
const MESSAGE_BYTES: usize = 64;

/// Digest of a model's files.
pub(super) type Fingerprint = [u8; 32];

/// Why a request cannot use a session, or a session cannot be forgotten.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SessionError {
    #[error("another request uses session {name:?} now: wait for its end, or cancel it")]
    InUse { name: String },
    #[error(
        "session {name:?} has the model {has}, and the request names {wanted}: name {has}, or another session"
    )]
    OtherModel { name: String, has: String, wanted: String },
    #[error(
        "session {name:?} has the model {model} as it was before its file changed: forget the session, or name another"
    )]
    OtherFile { name: String, model: String },
    #[error(
        "session {name:?} has {has}, and the request's prompt is {wanted}: send a prompt of the same kind, or name another \
         session"
    )]
    OtherKind { name: String, has: &'static str, wanted: &'static str },
    #[error(
        "session {name:?} would have {bytes} bytes, and all sessions of a user may have {limit}: forget the session, or name \
         another"
    )]
    TooLarge { name: String, bytes: u64, limit: u64 },
    #[error("{limit} sessions of this user are in use: wait for the end of a request")]
    TooMany { limit: usize },
    #[error("there is no room for the session: {}", .refusal.told(1, "bytes"))]
    Full { refusal: Refusal },
}

/// The sessions of all users.
#[derive(Debug)]
pub(super) struct Sessions {
    shares: Arc<Shares>,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// By user and name.
    entries: BTreeMap<(u32, String), Entry>,
    /// Grows with each use.
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    /// `None`: its first request runs.
    kept: Option<Kept>,
    /// At least the bytes of `kept`; more while a request uses the session.
    charge: Charge,
    in_use: bool,
}

#[derive(Clone, Debug)]
struct Kept {
    model: String,
    fingerprint: Fingerprint,
    content: Arc<Content>,
    tokens: u64,
    bytes: u64,
    /// Time of the last use by the table's clock.
    used: u64,
    /// The same time, and the age that it had then: that of a session of an earlier daemon.
    since: Instant,
    aged: Duration,
}

/// The state of a session before a request.
#[derive(Clone, Debug)]
pub(super) struct Before {
    pub fingerprint: Fingerprint,
    pub content: Arc<Content>,
}

/// The new state of a session.
#[derive(Clone, Debug)]
pub(super) struct After {
    pub fingerprint: Fingerprint,
    pub content: Content,
    pub tokens: u64,
    pub now: Instant,
    /// Time since the last use already.
    pub aged: Duration,
}

/// A session for its user to see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    pub name: String,
    pub model: String,
    /// Number of chat messages; `None` for a session of tokens.
    pub messages: Option<usize>,
    pub tokens: u64,
    pub age: Duration,
    pub bytes: u64,
    pub in_use: bool,
}

/// A request's use of a session. Dropped without [`Use::commit`], it leaves the session unchanged.
#[derive(Debug)]
pub(super) struct Use {
    sessions: Arc<Sessions>,
    key: (u32, String),
    model: String,
    before: Option<Before>,
}

impl Sessions {
    pub fn new() -> Arc<Self> {
        Self::with_total(BYTES_MAX)
    }

    fn with_total(bytes: u64) -> Arc<Self> {
        let table = Mutex::new(Rank::Sessions, Table::default());
        Arc::new(Self { shares: Shares::new(bytes), table })
    }

    /// Begins a use of a session, which is new if the user has none of that name.
    ///
    /// # Errors
    /// [`SessionError::InUse`], [`SessionError::OtherModel`].
    pub fn begin(self: &Arc<Self>, uid: u32, name: &str, model: &str) -> Result<Use, SessionError> {
        let key = (uid, name.to_owned());
        let mut table = self.table.lock();
        let mut before = None;
        match table.entries.get_mut(&key) {
            Some(entry) if entry.in_use => return Err(SessionError::InUse { name: key.1 }),
            Some(entry) => {
                if let Some(kept) = &entry.kept {
                    if kept.model != model {
                        let (has, wanted) = (kept.model.clone(), model.to_owned());
                        return Err(SessionError::OtherModel { name: key.1, has, wanted });
                    }
                    before =
                        Some(Before { fingerprint: kept.fingerprint, content: Arc::clone(&kept.content) });
                }
                entry.in_use = true;
            }
            None => {
                let charge = self.shares.take(Taker::of(uid), 0);
                let charge = charge.map_err(|refusal| SessionError::Full { refusal })?;
                table.entries.insert(key.clone(), Entry { kept: None, charge, in_use: true });
            }
        }
        drop(table);
        Ok(Use { sessions: Arc::clone(self), key, model: model.to_owned(), before })
    }

    /// A user's sessions by name; those whose first request runs are left out.
    pub fn list(&self, uid: u32, now: Instant) -> Vec<Listed> {
        let table = self.table.lock();
        let listed = |((_, name), entry): (&(u32, String), &Entry)| {
            let kept = entry.kept.as_ref()?;
            Some(Listed {
                name: name.clone(),
                model: kept.model.clone(),
                messages: match &*kept.content {
                    Content::Tokens(_) => None,
                    Content::Chat(messages) => Some(messages.len()),
                },
                tokens: kept.tokens,
                age: kept.age(now),
                bytes: kept.bytes,
                in_use: entry.in_use,
            })
        };
        table.of(uid).filter_map(listed).collect()
    }

    /// Sessions of each user, and their bytes. Those whose first request runs count too, by the room that it took.
    pub fn holdings(&self) -> BTreeMap<u32, (u64, u64)> {
        let mut of_users = BTreeMap::new();
        for ((uid, _), entry) in &self.table.lock().entries {
            let (sessions, bytes): &mut (u64, u64) = of_users.entry(*uid).or_default();
            *sessions += 1;
            *bytes = bytes.saturating_add(entry.charge.amount());
        }
        of_users
    }

    /// Forgets a user's session of that name, or all of the user. Returns how many.
    ///
    /// # Errors
    /// [`SessionError::InUse`]: then none is forgotten.
    pub fn forget(&self, uid: u32, name: Option<&str>) -> Result<usize, SessionError> {
        let mut table = self.table.lock();
        let asked = |(_, of): &(u32, String)| name.is_none_or(|name| name == of);
        if let Some(((_, name), _)) = table.of(uid).find(|(key, entry)| asked(key) && entry.in_use) {
            return Err(SessionError::InUse { name: name.clone() });
        }
        let before = table.entries.len();
        table.entries.retain(|key, _| key.0 != uid || !asked(key));
        Ok(before - table.entries.len())
    }

    /// The sessions to keep over a restart, the least recently used first. Of all users the last used ones first, then the
    /// next ones, as many as have at most that many bytes together.
    pub fn keep(&self, bytes_max: u64, now: Instant) -> Vec<KeptSession> {
        let table = self.table.lock();
        let mut of_users: BTreeMap<u32, Vec<(&String, &Kept)>> = BTreeMap::new();
        for ((uid, name), entry) in &table.entries {
            of_users.entry(*uid).or_default().extend(entry.kept.as_ref().map(|kept| (name, kept)));
        }
        let mut all = Vec::new();
        for (uid, mut sessions) in of_users {
            sessions.sort_by_key(|(_, kept)| std::cmp::Reverse(kept.used));
            let ranked = sessions.into_iter().enumerate();
            all.extend(ranked.map(|(rank, (name, kept))| (rank, uid, name, kept)));
        }
        all.sort_by_key(|(rank, _, _, kept)| (*rank, std::cmp::Reverse(kept.used)));
        let mut left = bytes_max;
        all.retain(|(.., kept)| match left.checked_sub(kept.bytes) {
            Some(rest) => {
                left = rest;
                true
            }
            None => false,
        });
        all.sort_by_key(|(.., kept)| kept.used);
        let keep = |(_, uid, name, kept): (usize, u32, &String, &Kept)| KeptSession {
            uid,
            name: name.clone(),
            model: kept.model.clone(),
            fingerprint: kept.fingerprint,
            tokens: kept.tokens,
            age_ms: u64::try_from(kept.age(now).as_millis()).unwrap_or(u64::MAX),
            content: Content::clone(&kept.content),
        };
        all.into_iter().map(keep).collect()
    }

    /// Takes sessions of an earlier daemon back, the least recently used first. Those without room are left out, and so are
    /// those whose names are taken. Returns how many came back.
    pub fn restore(self: &Arc<Self>, sessions: Vec<KeptSession>, now: Instant) -> usize {
        let restored = sessions.into_iter().filter_map(|session| {
            let KeptSession { uid, name, model, fingerprint, tokens, age_ms, content } = session;
            let used = self.begin(uid, &name, &model).ok().filter(|used| used.before.is_none())?;
            let aged = Duration::from_millis(age_ms);
            used.commit(After { fingerprint, content, tokens, now, aged }).ok()
        });
        restored.count()
    }
}

impl Kept {
    fn age(&self, now: Instant) -> Duration {
        self.aged.saturating_add(now.saturating_duration_since(self.since))
    }
}

impl Table {
    /// The entries of a user, by name.
    fn of(&self, uid: u32) -> impl Iterator<Item = (&(u32, String), &Entry)> {
        self.entries.range((uid, String::new())..).take_while(move |((of, _), _)| *of == uid)
    }

    /// The user's least recently used session that no request uses.
    fn next_to_go(&self, uid: u32) -> Option<(u32, String)> {
        let idle = self.of(uid).filter(|(_, entry)| !entry.in_use);
        let oldest = idle.min_by_key(|(_, entry)| entry.kept.as_ref().map(|kept| kept.used));
        oldest.map(|(key, _)| key.clone())
    }

    /// Takes what a session needs to have `bytes`, and a place among the user's sessions. Forgets others of the user.
    fn make_room(&mut self, key: &(u32, String), bytes: u64) -> Result<(), SessionError> {
        let (uid, name) = key;
        if bytes > BYTES_MAX_OF_UID {
            return Err(SessionError::TooLarge { name: name.clone(), bytes, limit: BYTES_MAX_OF_UID });
        }
        while self.of(*uid).filter(|(of, entry)| entry.kept.is_some() || *of == key).count() > SESSIONS_MAX {
            let oldest = self.next_to_go(*uid).ok_or(SessionError::TooMany { limit: SESSIONS_MAX })?;
            self.entries.remove(&oldest);
        }
        while let Some(entry) = self.entries.get_mut(key) {
            let more = bytes.saturating_sub(entry.charge.amount());
            match entry.charge.grow_within(more, BYTES_MAX_OF_UID) {
                Ok(()) => break,
                Err(refusal) => {
                    let oldest = self.next_to_go(*uid).ok_or(SessionError::Full { refusal })?;
                    self.entries.remove(&oldest);
                }
            }
        }
        Ok(())
    }
}

impl Use {
    /// The session's name.
    pub fn name(&self) -> &str {
        &self.key.1
    }

    /// The session's state before the request; `None` for a new one.
    pub fn before(&self) -> Option<&Before> {
        self.before.as_ref()
    }

    /// Makes room for a session of that content's size, so that a request without room does no work.
    ///
    /// # Errors
    /// [`SessionError::TooLarge`], [`SessionError::TooMany`], [`SessionError::Full`].
    pub fn reserve(&self, content: &Content) -> Result<(), SessionError> {
        self.sessions.table.lock().make_room(&self.key, self.bytes(content))
    }

    /// Gives the session its new state, and ends the use. Returns its tokens.
    ///
    /// # Errors
    /// As [`Use::reserve`]: then the session is unchanged.
    pub fn commit(self, after: After) -> Result<u64, SessionError> {
        let bytes = self.bytes(&after.content);
        let mut table = self.sessions.table.lock();
        table.make_room(&self.key, bytes)?;
        table.clock += 1;
        let used = table.clock;
        let After { fingerprint, content, tokens, now: since, aged } = after;
        if let Some(entry) = table.entries.get_mut(&self.key) {
            let (model, content) = (self.model.clone(), Arc::new(content));
            entry.kept = Some(Kept { model, fingerprint, content, tokens, bytes, used, since, aged });
        }
        Ok(tokens)
    }

    /// Bytes of the session with that content.
    fn bytes(&self, content: &Content) -> u64 {
        let content = match content {
            Content::Tokens(ids) => size_of_val(&**ids),
            Content::Chat(messages) => {
                messages.iter().map(|said| said.role.len() + said.content.len() + MESSAGE_BYTES).sum()
            }
        };
        (SESSION_BYTES + self.key.1.len() + self.model.len() + content) as u64
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut table = self.sessions.table.lock();
        let Some(entry) = table.entries.get_mut(&self.key) else { return };
        match &entry.kept {
            Some(kept) => {
                let spare = entry.charge.amount().saturating_sub(kept.bytes);
                entry.charge.shrink(spare);
                entry.in_use = false;
            }
            None => drop(table.entries.remove(&self.key)),
        }
    }
}

#[cfg(test)]
mod tests;
