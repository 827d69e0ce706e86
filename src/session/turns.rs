//! Turns limit how much work runs at once, in all and for one uid, so that one uid's slow requests do not delay others.
//!
//! A waiter holds no thread. A request first waits for a turn of its own uid, then for one of all turns. So at most a
//! uid's bound of its requests stand in the common queue, which is first come, first served.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::lock::{Mutex, Rank};

/// Turns of one kind.
#[derive(Debug)]
pub(super) struct Turns {
    all: Arc<Semaphore>,
    of_uid: usize,
    /// Uids that have a turn or wait for one.
    uids: Mutex<HashMap<u32, Uid>>,
}

#[derive(Debug)]
struct Uid {
    turns: Arc<Semaphore>,
    /// Requests that have a turn or wait; the entry is removed with the last one.
    users: usize,
}

/// One turn, held until it drops.
#[derive(Debug)]
pub(super) struct Turn {
    /// Both are always `Some`: the semaphores are never closed.
    _permits: [Option<OwnedSemaphorePermit>; 2],
    _user: User,
}

/// A request that has a turn or waits for one.
#[derive(Debug)]
struct User {
    turns: Arc<Turns>,
    uid: u32,
}

impl Turns {
    /// `all` turns at once, `of_uid` of them for one uid.
    pub(super) fn new(all: usize, of_uid: usize) -> Arc<Self> {
        Arc::new(Self {
            all: Arc::new(Semaphore::new(all)),
            of_uid,
            uids: Mutex::new(Rank::Turns, HashMap::new()),
        })
    }

    /// Waits for a turn.
    pub(super) async fn take(self: &Arc<Self>, uid: u32) -> Turn {
        let (user, of_uid) = self.enter(uid);
        let of_uid = of_uid.acquire_owned().await.ok();
        let of_all = Arc::clone(&self.all).acquire_owned().await.ok();
        Turn { _permits: [of_uid, of_all], _user: user }
    }

    fn enter(self: &Arc<Self>, uid: u32) -> (User, Arc<Semaphore>) {
        let mut uids = self.uids.lock();
        let new = || Uid { turns: Arc::new(Semaphore::new(self.of_uid)), users: 0 };
        let entry = uids.entry(uid).or_insert_with(new);
        entry.users += 1;
        (User { turns: Arc::clone(self), uid }, Arc::clone(&entry.turns))
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let mut uids = self.turns.uids.lock();
        if let Some(entry) = uids.get_mut(&self.uid) {
            entry.users -= 1;
            if entry.users == 0 {
                uids.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::poll;

    use super::*;

    #[tokio::test]
    async fn one_uid_has_its_share_and_another_passes_its_queue() {
        let turns = Turns::new(4, 2);
        let _first = turns.take(1).await;
        let second = turns.take(1).await;
        let mut third = std::pin::pin!(turns.take(1));
        assert!(poll!(&mut third).is_pending(), "the uid has both of its turns");
        let _other = [turns.take(2).await, turns.take(2).await];
        let mut waits_for_all = std::pin::pin!(turns.take(3));
        assert!(poll!(&mut waits_for_all).is_pending(), "all four are taken");
        drop(second);
        assert!(poll!(&mut third).is_pending(), "uid 3 came before it to the common queue");
        assert!(poll!(&mut waits_for_all).is_ready());
    }

    #[tokio::test]
    async fn nothing_is_kept_of_a_uid_that_has_and_wants_nothing() {
        let turns = Turns::new(1, 1);
        let turn = turns.take(1).await;
        {
            let mut gives_up = Box::pin(turns.take(2));
            assert!(poll!(&mut gives_up).is_pending());
            assert_eq!(turns.uids.lock().len(), 2);
        }
        assert_eq!(turns.uids.lock().len(), 1);
        drop(turn);
        assert_eq!(turns.uids.lock().len(), 0);
        assert_eq!(turns.all.available_permits(), 1);
    }
}
