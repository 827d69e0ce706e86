//! The types that locks are built on: those of parking_lot and the standard library, or, under the feature `loom`,
//! those of a model checker. The checker runs a test in every possible order of its threads.
//!
//! The checker's types work only inside `explore`, so a build with that feature is only for such tests: `cargo xtask
//! interleavings`.

use std::time::Instant;

pub use imp::*;

/// A process-wide table: `table!(static NAME: [Type; count] = value)`; the value is a constant expression.
macro_rules! table {
    ($(#[$doc:meta])* static $name:ident: [$of:ty; $count:expr] = $value:expr) => {
        #[cfg(not(feature = "loom"))]
        $(#[$doc])*
        static $name: [$of; $count] = [const { $value }; $count];
        #[cfg(feature = "loom")]
        ::loom::lazy_static! {
            $(#[$doc])*
            static ref $name: Vec<$of> = (0..$count).map(|_| $value).collect();
        }
    };
}
pub(crate) use table;

/// The current time, for decisions that depend on time.
pub fn now() -> Instant {
    #[cfg(test)]
    if let Some(time) = clock::of_this_thread() {
        return time;
    }
    real_time()
}

/// For tests: a thread's own clock. It moves only when the thread says so, however busy the machine is.
#[cfg(test)]
pub mod clock {
    use std::cell::Cell;
    use std::time::{Duration, Instant};

    thread_local!(static CLOCK: Cell<Option<Instant>> = const { Cell::new(None) });

    pub(super) fn of_this_thread() -> Option<Instant> {
        CLOCK.get()
    }

    /// Moves this thread's clock. The first call starts it at the real time.
    pub fn advance(by: Duration) {
        CLOCK.set(Some(super::now() + by));
    }
}

#[cfg(not(feature = "loom"))]
mod imp {
    use std::time::{Duration, Instant};

    pub use parking_lot::{Mutex, MutexGuard};

    /// Atomics and fences.
    pub mod atomic {
        pub use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, fence};
    }

    /// A condition variable for holders of a lock.
    #[derive(Debug, Default)]
    pub struct Condvar(parking_lot::Condvar);

    impl Condvar {
        pub const fn new() -> Self {
            Self(parking_lot::Condvar::new())
        }

        pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            self.0.wait(guard);
        }

        /// True on timeout.
        pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, moment: Instant) -> bool {
            self.0.wait_until(guard, moment).timed_out()
        }

        pub fn notify_one(&self) {
            self.0.notify_one();
        }

        pub fn notify_all(&self) {
            self.0.notify_all();
        }
    }

    pub fn real_time() -> Instant {
        Instant::now()
    }

    /// Sleeps for `time`.
    pub fn pause(time: Duration) {
        std::thread::sleep(time);
    }
}

#[cfg(feature = "loom")]
mod imp {
    use std::ops::{Deref, DerefMut};
    use std::sync::{OnceLock, PoisonError};
    use std::time::{Duration, Instant};

    /// Atomics and fences.
    pub mod atomic {
        pub use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, fence};
    }

    #[derive(Debug)]
    pub struct Mutex<T>(loom::sync::Mutex<T>);

    /// The guard; `None` only while its holder waits on a [`Condvar`].
    #[derive(Debug)]
    pub struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)))
        }
    }

    #[allow(clippy::expect_used)] // see `MutexGuard`
    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.0.as_ref().expect("a holder that does not wait")
        }
    }

    #[allow(clippy::expect_used)]
    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().expect("a holder that does not wait")
        }
    }

    #[derive(Debug, Default)]
    pub struct Condvar(loom::sync::Condvar);

    impl Condvar {
        pub fn new() -> Self {
            Self(loom::sync::Condvar::new())
        }

        pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            if let Some(held) = guard.0.take() {
                guard.0 = Some(self.0.wait(held).unwrap_or_else(PoisonError::into_inner));
            }
        }

        /// Never times out: the checker reports a waiter that is never woken as a deadlock.
        pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, _: Instant) -> bool {
            self.wait(guard);
            false
        }

        pub fn notify_one(&self) {
            self.0.notify_one();
        }

        pub fn notify_all(&self) {
            self.0.notify_all();
        }
    }

    /// A constant: a thread's behaviour depends only on the order of threads.
    pub fn real_time() -> Instant {
        static NOW: OnceLock<Instant> = OnceLock::new();
        *NOW.get_or_init(Instant::now)
    }

    /// Yields to other threads.
    pub fn pause(_: Duration) {
        loom::thread::yield_now();
    }
}

/// For tests: threads and the exploration of their orders.
#[cfg(all(test, feature = "loom"))]
pub mod checker {
    pub use loom::future::block_on;
    pub use loom::thread::JoinHandle;

    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Words of a thread's stack: the engine's frames are large in unoptimised builds.
    const STACK_WORDS: usize = 1 << 17;

    /// Runs `test` in every order of its threads with at most `switches` preemptions, or `ROCMFORGE_LOOM_SWITCHES`.
    /// Prints the number of orders.
    pub fn explore(switches: usize, test: impl Fn() + Sync + Send + 'static) {
        let wanted = std::env::var("ROCMFORGE_LOOM_SWITCHES").ok().and_then(|text| text.parse().ok());
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(wanted.unwrap_or(switches));
        builder.max_branches = 100_000;
        let (test, orders) = (Arc::new(test), Arc::new(AtomicU64::new(0)));
        let counted = Arc::clone(&orders);
        builder.check(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            let test = Arc::clone(&test);
            // The first of the checker's five threads has a small stack, so it only waits.
            spawn(move || test()).join().expect("a panic ends the exploration before this");
        });
        println!("{} orders tried", orders.load(Ordering::Relaxed));
    }

    /// A thread with a stack large enough for the engine.
    pub fn spawn<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        loom::thread::Builder::new().stack_size(STACK_WORDS).spawn(run).expect("a thread of the checker")
    }
}
