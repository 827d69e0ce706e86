//! What locks are made of: parking_lot's and the standard library's types, or, under the feature `loom`, those of a model
//! checker, which runs a test in every order in which its threads can get to them.
//!
//! The checker's types work inside `explore` only, so a build with that feature is for tests of that kind alone:
//! `cargo xtask interleavings`.

pub use imp::*;

/// A table for the whole process: `table!(static NAME: [Type; count] = value)`, the value a constant expression.
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

#[cfg(not(feature = "loom"))]
mod imp {
    use std::time::{Duration, Instant};

    pub use parking_lot::{Mutex, MutexGuard};

    /// Atomics and fences.
    pub mod atomic {
        pub use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, fence};
    }

    /// What holders of a lock wait on.
    #[derive(Debug, Default)]
    pub struct Condvar(parking_lot::Condvar);

    impl Condvar {
        pub const fn new() -> Self {
            Self(parking_lot::Condvar::new())
        }

        pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            self.0.wait(guard);
        }

        /// True when the moment came first.
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

    /// This moment, for who decides by time what to do next.
    pub fn now() -> Instant {
        Instant::now()
    }

    /// Lets others go on for a while.
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

    /// The value; none only while its holder waits on a [`Condvar`].
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

    #[allow(clippy::expect_used)] // as said there
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

        /// The moment never comes: who is not woken is found as a deadlock.
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

    /// Time stands still: what a thread does depends on the order of threads alone.
    pub fn now() -> Instant {
        static NOW: OnceLock<Instant> = OnceLock::new();
        *NOW.get_or_init(Instant::now)
    }

    /// Lets others go on.
    pub fn pause(_: Duration) {
        loom::thread::yield_now();
    }
}

/// For tests: threads and their orders.
#[cfg(all(test, feature = "loom"))]
pub mod checker {
    pub use loom::future::block_on;
    pub use loom::thread::JoinHandle;

    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Words of a thread's stack: the engine's own frames are large where nothing is optimised.
    const STACK_WORDS: usize = 1 << 17;

    /// Runs `test` in every order of its threads in which at most `switches` of them are stopped where they could go on, or
    /// `ROCMFORGE_LOOM_SWITCHES`. Prints how many orders that were.
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
            // Of its own five threads the checker's first has a small stack: it only waits.
            spawn(move || test()).join().expect("a panic ends the exploration before this");
        });
        println!("{} orders tried", orders.load(Ordering::Relaxed));
    }

    /// A thread with room for the engine.
    pub fn spawn<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        loom::thread::Builder::new().stack_size(STACK_WORDS).spawn(run).expect("a thread of the checker")
    }
}
