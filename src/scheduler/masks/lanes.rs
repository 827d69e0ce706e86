//! Queues of sequences whose masks are to be computed, and the threads that work on them. Users take turns.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use super::{Masking, Wake};
use crate::lock::{Condvar, Mutex, Rank};

/// Stack of a thread: expressions of a constraint may nest deep.
const STACK: usize = 64 << 20;

/// A queue, and the threads that work on it.
pub(super) struct Lane {
    pub queue: Arc<Queue>,
    pub threads: Vec<JoinHandle<()>>,
    /// The queue has sequences of which no thread was told.
    pub is_untold: bool,
}

#[derive(Debug)]
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    pub wanted: Condvar,
    /// Most threads of one user.
    of_user: usize,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Users in the order of their turns, with their sequences.
    users: VecDeque<(u32, VecDeque<Weak<Masking>>)>,
    /// Threads that work for each user.
    busy: BTreeMap<u32, usize>,
    closed: bool,
}

impl Lane {
    /// Starts threads, of which a user has at most `of_user`. `nice` is added to the daemon's own niceness.
    pub fn start(count: usize, of_user: usize, nice: i32, wake: &Wake) -> Self {
        let waiting = Mutex::new(Rank::MaskQueue, Waiting::default());
        let queue = Arc::new(Queue { waiting, wanted: Condvar::new(), of_user });
        let threads = (0..count).filter_map(|_| start(&queue, nice, wake)).collect();
        Self { queue, threads, is_untold: false }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.queue.waiting.lock().closed = true;
        self.queue.wanted.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // panics were caught
        }
    }
}

fn start(queue: &Arc<Queue>, nice: i32, wake: &Wake) -> Option<JoinHandle<()>> {
    let (queue, wake) = (Arc::clone(queue), Arc::clone(wake));
    let work = move || {
        if nice > 0
            && let Err(error) = rustix::process::nice(nice)
        {
            tracing::debug!(%error, "slow masks are computed at the usual priority");
        }
        while let Some(masking) = queue.next() {
            masking.compute(&wake);
            queue.done(masking.uid);
        }
    };
    std::thread::Builder::new().name("mask".into()).stack_size(STACK).spawn(work).ok()
}

impl Queue {
    /// Adds a sequence behind others of its user.
    pub fn put(&self, masking: &Arc<Masking>) {
        let mut waiting = self.waiting.lock();
        let sequence = Arc::downgrade(masking);
        match waiting.users.iter_mut().find(|(uid, _)| *uid == masking.uid) {
            Some((_, sequences)) => sequences.push_back(sequence),
            None => waiting.users.push_back((masking.uid, VecDeque::from([sequence]))),
        }
    }

    /// The next sequence; `None` once the queue is closed. [`Queue::done`] ends the work on it.
    fn next(&self) -> Option<Arc<Masking>> {
        let mut waiting = self.waiting.lock();
        loop {
            if waiting.closed {
                return None;
            }
            let next = waiting.take(self.of_user);
            if waiting.has_work(self.of_user) {
                self.wanted.notify_one(); // one that sleeps, if any
            }
            match next {
                Some(masking) => return Some(masking),
                None => self.wanted.wait(&mut waiting),
            }
        }
    }

    /// A thread has done its work for a user.
    fn done(&self, uid: u32) {
        let mut waiting = self.waiting.lock();
        if let Some(busy) = waiting.busy.get_mut(&uid) {
            *busy -= 1;
            if *busy == 0 {
                waiting.busy.remove(&uid);
            }
        }
    }
}

impl Waiting {
    fn is_free(&self, uid: u32, of_user: usize) -> bool {
        self.busy.get(&uid).is_none_or(|busy| *busy < of_user)
    }

    fn has_work(&self, of_user: usize) -> bool {
        self.users.iter().any(|(uid, _)| self.is_free(*uid, of_user))
    }

    /// Takes the next sequence of the first user that has less than all the threads it may. The user's next turn is after all others.
    fn take(&mut self, of_user: usize) -> Option<Arc<Masking>> {
        loop {
            let at = (0..self.users.len()).find(|at| self.is_free(self.users[*at].0, of_user))?;
            let (uid, mut sequences) = self.users.remove(at)?;
            let next = std::iter::from_fn(|| sequences.pop_front()).find_map(|sequence| sequence.upgrade());
            if !sequences.is_empty() {
                self.users.push_back((uid, sequences));
            }
            if let Some(masking) = next {
                *self.busy.entry(uid).or_default() += 1;
                return Some(masking);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::SLOW;
    use super::super::tests::masking;
    use super::*;

    #[test]
    fn users_take_turns_none_has_all_threads_and_nobody_works_for_sequences_that_ended() {
        let of = |uid| Arc::new(masking(uid, SLOW, None));
        let (many, one): (Vec<_>, _) = ((0..4).map(|_| of(10)).collect(), of(11));
        let waiting = Mutex::new(Rank::MaskQueue, Waiting::default());
        let queue = Queue { waiting, wanted: Condvar::new(), of_user: 1 };
        many.iter().chain([&one]).for_each(|masking| queue.put(masking));
        let take = || queue.waiting.lock().take(queue.of_user).map(|masking| masking.uid);
        assert_eq!([take(), take(), take()], [Some(10), Some(11), None], "each has a thread");
        queue.done(10);
        drop(many);
        assert_eq!(take(), None, "they ended");
        queue.done(11);
        queue.put(&one);
        assert_eq!(take(), Some(11));
    }
}
