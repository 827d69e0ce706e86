//! Mutexes with a place in one order: a thread takes a lock only if all that it holds come before it.
//!
//! Two threads that take the same locks in the same order never wait for each other in a circle. The order is [`Rank`]; a
//! debug build panics where a thread breaks it, with the names of the locks, whether or not another thread is in its way that
//! time. A release build checks nothing and pays nothing.

mod bare;

use std::ops::{Deref, DerefMut};
use std::time::Instant;

#[cfg(all(test, feature = "loom"))]
pub use bare::checker;
pub(crate) use bare::table;
pub use bare::{atomic, now, pause};

/// Every lock there is, in the order in which a thread may take them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Rank {
    /// Who is connected.
    Connections,
    /// What new connections are granted.
    ConnectionLimits,
    /// Requests of one connection.
    Streams,
    /// Credit of one request; held while its job is handed to the engine.
    Credit,
    /// Requests of all connections.
    ActiveRequests,
    /// Answers kept for repeats.
    RequestMemory,
    /// Who waits for a blocking thread.
    Turns,
    /// The last look at GPUs; held while another is taken.
    Doctor,
    /// Frames that wait for one client.
    Outbox,
    /// Who may do what.
    Policy,
    /// What the service manager stores; held while it is told.
    Kept,
    /// One scan of the directories of models at a time.
    StoreScan,
    /// Names, files and models.
    StoreTables,
    /// Which vocabularies mapped models have.
    Tokenizers,
    /// What of a model's files is kept in memory.
    ModelPages,
    /// Models whose pages are to be brought or let go.
    PagesQueue,
    /// Commands to the engine.
    Inbox,
    /// The engine's last snapshot.
    Snapshot,
    /// What is fixed about the engine's device.
    DeviceFacts,
    /// Tensors to be brought to a device.
    UploadQueue,
    /// How they are brought.
    UploadRoutes,
    /// Streams that copies are submitted to.
    UploadStreams,
    /// What became of one tensor's pieces.
    UploadJob,
    /// How far one tensor's copy is.
    Weight,
    /// A device's memory.
    Arena,
    /// What a recorded graph keeps alive.
    Capture,
    /// The panic of a computing thread.
    ThreadPool,
}

// The threads of a model checker are one thread of the process.
#[cfg(all(debug_assertions, not(feature = "loom")))]
mod order {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::Rank;

    const RANKS: usize = Rank::ThreadPool as usize + 1;

    thread_local! {
        /// Bit n: the thread holds a lock of rank n. There is never more than one of a rank.
        static HELD: Cell<u64> = const { Cell::new(0) };
    }

    const _: () = assert!(RANKS <= 64);

    /// How often locks of each rank were taken.
    static TAKEN: [AtomicU64; RANKS] = [const { AtomicU64::new(0) }; RANKS];

    pub fn taken(rank: Rank) -> Option<u64> {
        TAKEN.get(rank as usize).map(|count| count.load(Ordering::Relaxed))
    }

    #[allow(clippy::panic)] // what this is for
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

/// How often locks of this rank were taken in this process; `None` where nobody counts, in release builds.
pub fn taken(rank: Rank) -> Option<u64> {
    order::taken(rank)
}

/// A mutex with a place in the order. Without poisoning: a panic leaves the value as it was at that moment.
#[derive(Debug)]
pub struct Mutex<T> {
    rank: Rank,
    inner: bare::Mutex<T>,
}

/// The value of a locked [`Mutex`]. It cannot be sent to another thread, so no task keeps it across an await.
#[derive(Debug)]
pub struct Guard<'a, T> {
    /// Dropped first: unlocked, then forgotten.
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
    /// A lock around `value` at this place of the order.
    pub fn new(rank: Rank, value: T) -> Self {
        Self { rank, inner: bare::Mutex::new(value) }
    }

    /// Waits for the lock.
    ///
    /// # Panics
    /// In debug builds, when the thread holds a lock of this rank or of a later one: a bug, told before it can hang.
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

/// What threads that hold a [`Mutex`] wait on.
#[derive(Debug, Default)]
pub struct Condvar(bare::Condvar);

impl Condvar {
    /// One that nobody waits on.
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

    /// As [`Condvar::wait`], at most until `moment`. True when that came first.
    ///
    /// # Panics
    /// As [`Condvar::wait`].
    #[track_caller]
    pub fn wait_until<T>(&self, guard: &mut Guard<'_, T>, moment: Instant) -> bool {
        order::check_alone(guard.held.0);
        self.0.wait_until(&mut guard.inner, moment)
    }

    /// Wakes one that waits.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all that wait.
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
            drop(first); // in whatever order they are given back
            assert_eq!(*second, 2);
        }
        let held = weight.lock();
        let panic = catch_unwind(AssertUnwindSafe(|| *inbox.lock())).unwrap_err();
        assert!(text(panic).contains("Inbox"));
        drop(held);
        assert_eq!(*inbox.lock(), 1, "the refused lock is not held");
        // Two of a rank have no order between them.
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
