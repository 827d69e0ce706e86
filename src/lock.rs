//! Mutexes with a rank in one order: a thread takes a lock only if all locks it holds have lower ranks.
//!
//! Two threads that take the same locks in the same order never wait for each other in a circle. The order is [`Rank`].
//! A debug build panics when a thread breaks it, with the names of the locks, whether or not another thread contends at
//! that moment. A release build checks nothing and pays nothing.
//!
//! Few of these locks meet in practice:
//!
//! - a request's `Credit`, then the engine's `Inbox`, then its `Snapshot`, which takes `UploadRoutes` to read the rates
//! - an uploader's `UploadQueue`, then its `UploadRoutes`
//! - its `UploadStreams`, then a tensor's `UploadJob` and `Weight`; a weight notifies its waiters with no lock held
//! - a device's `Arena`, after all of these

mod bare;

use std::ops::{Deref, DerefMut};
use std::time::Instant;

#[cfg(all(test, feature = "loom"))]
pub use bare::checker;
#[cfg(test)]
pub use bare::clock;
pub(crate) use bare::table;
pub use bare::{atomic, now, pause};

/// All locks of the daemon, in the order in which a thread may take them. The client has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Rank {
    /// Open connections.
    Connections,
    /// Uids whose connections were refused.
    LoggedUids,
    /// Requests of one connection.
    Streams,
    /// Credit of one request; held while its job is handed to the engine.
    Credit,
    /// Requests of all connections.
    ActiveRequests,
    /// Answers kept for repeats.
    Repeats,
    /// Sessions of all users.
    Sessions,
    /// Users of blocking threads, and waiters for one.
    Turns,
    /// Users' allowances of processor time for texts.
    TextTime,
    /// Payments of users for their frames.
    Pace,
    /// The kernel's counts of models' pages; held while it counts.
    PageCounts,
    /// The last report about GPUs; held while a new one is made.
    Doctor,
    /// The way to the thread that starts programs; held while it takes an order.
    Starter,
    /// Frames queued for one client.
    Outbox,
    /// Rights of users.
    Policy,
    /// Names of draft models.
    DraftModels,
    /// State stored in the service manager; held while it is updated.
    Kept,
    /// Files of kept prefixes on their way to the engine.
    PrefixRestores,
    /// The way to the writer of kept prefixes, and the writer.
    PrefixTasks,
    /// Files of kept prefixes.
    PrefixFiles,
    /// Held during a scan of the model directories: one at a time.
    StoreScan,
    /// Names, files and models.
    StoreTables,
    /// Vocabularies shared by mapped models.
    Tokenizers,
    /// Held while a vocabulary's table for constraints is made.
    Vocabulary,
    /// Constraints of one vocabulary that are being compiled.
    Compiling,
    /// Compiled constraints of one vocabulary.
    Constraints,
    /// Why a chat template refused a conversation; only in the process that renders it.
    TemplateRefusal,
    /// State of a model's files in the machine's memory.
    ModelPages,
    /// Models whose pages are to be read in or released.
    PagesQueue,
    /// Sequences whose next token's mask is to be computed.
    MaskQueue,
    /// The mask of one sequence's next token.
    Mask,
    /// Commands to the engine.
    Inbox,
    /// The engine's last snapshot.
    Snapshot,
    /// Fixed properties of the engine's device.
    DeviceFacts,
    /// Tensors to load to a device.
    UploadQueue,
    /// Upload methods and their rates.
    UploadRoutes,
    /// Streams that copies are submitted to.
    UploadStreams,
    /// State of one tensor's pieces.
    UploadJob,
    /// State of one tensor's copy.
    Weight,
    /// A device's memory.
    Arena,
    /// Memory that a recorded graph keeps alive.
    Capture,
    /// The panic of a computing thread.
    ThreadPool,
    /// Work on threads that may be lost.
    Aside,
    /// Descriptors that are being closed; a request may drop under any lock.
    Closing,
    /// Limits of users, read under any lock.
    UserLimits,
    /// Users' shares of a resource. Last, because a charge may drop under any lock.
    Shares,
}

// A model checker runs its threads on one thread of the process, so the thread-local table would be wrong.
#[cfg(all(debug_assertions, not(feature = "loom")))]
mod order {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::Rank;

    const RANKS: usize = Rank::Shares as usize + 1;

    thread_local! {
        /// Bit n: the thread holds a lock of rank n. It never holds two locks of one rank.
        static HELD: Cell<u64> = const { Cell::new(0) };
    }

    const _: () = assert!(RANKS <= 64);

    /// Counts of locks taken, by rank.
    static TAKEN: [AtomicU64; RANKS] = [const { AtomicU64::new(0) }; RANKS];

    pub fn taken(rank: Rank) -> Option<u64> {
        TAKEN.get(rank as usize).map(|count| count.load(Ordering::Relaxed))
    }

    #[allow(clippy::panic)] // the purpose of this function
    #[track_caller]
    pub fn enter(rank: Rank) {
        let held = HELD.get();
        if held >> rank as u8 != 0 {
            let last = held.ilog2() as usize;
            panic!("{rank:?} (lock {}) is taken while lock {last} of lock::Rank is held", rank as u8);
        }
        HELD.set(held | 1 << rank as u8);
        if let Some(count) = TAKEN.get(rank as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn leave(rank: Rank) {
        HELD.set(HELD.get() & !(1 << rank as u8));
    }

    #[allow(clippy::panic)] // as above
    #[track_caller]
    pub fn check_alone(rank: Rank) {
        let held = HELD.get();
        assert!(held == 1 << rank as u8, "{rank:?} is waited on while other locks are held: {held:#b}");
    }
}

#[cfg(not(all(debug_assertions, not(feature = "loom"))))]
mod order {
    use super::Rank;

    pub fn taken(_: Rank) -> Option<u64> {
        None
    }

    pub fn enter(_: Rank) {}

    pub fn leave(_: Rank) {}

    pub fn check_alone(_: Rank) {}
}

/// Number of locks of this rank taken in this process; `None` in release builds, which do not count.
pub fn taken(rank: Rank) -> Option<u64> {
    order::taken(rank)
}

/// A mutex with a rank. It has no poisoning: a panic leaves the value as it was at that moment.
#[derive(Debug)]
pub struct Mutex<T> {
    rank: Rank,
    inner: bare::Mutex<T>,
}

/// The locked value of a [`Mutex`]. It is not `Send`, so no task keeps it across an await.
#[derive(Debug)]
pub struct Guard<'a, T> {
    /// Must drop first: the lock is released before `held` forgets it.
    inner: bare::MutexGuard<'a, T>,
    held: Held,
}

/// A lock that the thread holds.
#[derive(Debug)]
struct Held(Rank);

impl Drop for Held {
    fn drop(&mut self) {
        order::leave(self.0);
    }
}

impl<T> Mutex<T> {
    /// A mutex around `value` with this rank.
    pub fn new(rank: Rank, value: T) -> Self {
        Self { rank, inner: bare::Mutex::new(value) }
    }

    /// Waits for the lock.
    ///
    /// # Panics
    /// In debug builds, when the thread holds a lock of this rank or a later one: a bug that could deadlock.
    #[track_caller]
    pub fn lock(&self) -> Guard<'_, T> {
        order::enter(self.rank);
        let held = Held(self.rank);
        Guard { inner: self.inner.lock(), held }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

/// A condition variable for holders of a [`Mutex`].
#[derive(Debug, Default)]
pub struct Condvar(bare::Condvar);

impl Condvar {
    /// A condition variable without waiters.
    pub fn new() -> Self {
        Self(bare::Condvar::new())
    }

    /// Unlocks, waits to be notified, and locks again.
    ///
    /// # Panics
    /// In debug builds, when the thread holds another lock: it would keep it while it sleeps.
    #[track_caller]
    pub fn wait<T>(&self, guard: &mut Guard<'_, T>) {
        order::check_alone(guard.held.0);
        self.0.wait(&mut guard.inner);
    }

    /// As [`Condvar::wait`], but at most until `moment`. True on timeout.
    ///
    /// # Panics
    /// As [`Condvar::wait`].
    #[track_caller]
    pub fn wait_until<T>(&self, guard: &mut Guard<'_, T>, moment: Instant) -> bool {
        order::check_alone(guard.held.0);
        self.0.wait_until(&mut guard.inner, moment)
    }

    /// Wakes one waiter.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all waiters.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    use super::*;

    fn text(panic: Box<dyn std::any::Any + Send>) -> String {
        *panic.downcast::<String>().unwrap()
    }

    #[test]
    #[cfg(debug_assertions)]
    fn a_lock_taken_out_of_order_panics_at_once() {
        let (inbox, weight) = (Mutex::new(Rank::Inbox, 1), Mutex::new(Rank::Weight, 2));
        {
            let (first, second) = (inbox.lock(), weight.lock());
            assert_eq!(*first + *second, 3);
            drop(first); // the order of release does not matter
            assert_eq!(*second, 2);
        }
        let held = weight.lock();
        let panic = catch_unwind(AssertUnwindSafe(|| *inbox.lock())).unwrap_err();
        assert!(text(panic).contains("Inbox"));
        drop(held);
        assert_eq!(*inbox.lock(), 1, "the refused lock is not held");
        // Two locks of one rank have no order.
        let other = Mutex::new(Rank::Weight, 3);
        let held = weight.lock();
        assert!(catch_unwind(AssertUnwindSafe(|| *other.lock())).is_err());
        drop(held);
        assert_eq!(*other.lock(), 3);
    }

    #[test]
    #[cfg(debug_assertions)]
    fn other_threads_have_an_order_of_their_own_and_locks_are_counted() {
        let weight = Arc::new(Mutex::new(Rank::Capture, 0));
        let before = taken(Rank::Capture).unwrap();
        let held = weight.lock();
        let other = Arc::clone(&weight);
        let thread = std::thread::spawn(move || {
            let tables = Mutex::new(Rank::StoreTables, 5);
            let all = *tables.lock();
            *other.lock() = all;
        });
        drop(held);
        thread.join().unwrap();
        assert_eq!(*weight.lock(), 5);
        assert!(taken(Rank::Capture).unwrap() >= before + 3);
    }

    #[test]
    #[cfg(debug_assertions)]
    fn nobody_sleeps_with_another_lock() {
        let (scan, tables, changed) =
            (Mutex::new(Rank::StoreScan, ()), Mutex::new(Rank::StoreTables, ()), Condvar::new());
        let past = Instant::now();
        assert!(changed.wait_until(&mut tables.lock(), past));
        let _scan = scan.lock();
        let mut tables = tables.lock();
        let slept = catch_unwind(AssertUnwindSafe(|| changed.wait_until(&mut tables, past)));
        assert!(text(slept.unwrap_err()).contains("StoreTables"));
    }
}
