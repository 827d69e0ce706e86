//! Worker threads that share the chunks of a phase; the caller is worker 0.
//!
//! A phase is one call of [`Pool::run`]: free workers claim chunks from a counter, and the call returns when all are
//! done. Helpers join an open phase and leave it. The caller waits only for helpers inside, so a helper that the
//! kernel has descheduled costs only its help. Idle helpers spin for [`SPIN`], then sleep on a futex.
//!
//! `state`: `epoch << 16 | OPEN | WAITING | helpers inside`. A phase opens with a new epoch, closes when its chunks
//! are claimed, and ends when no helper is inside. Epochs repeat after 65,536 phases; at worst one helper then misses
//! one phase.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::futex;

use crate::lock::{Mutex, Rank};

/// Time that a helper spins before it sleeps. It is longer than the serial parts between the phases of a layer (1-5
/// us), and short enough that an idle daemon uses no processor.
const SPIN: Duration = Duration::from_micros(50);

const OPEN: u32 = 1 << 15;
/// The caller sleeps until the last helper leaves.
const WAITING: u32 = 1 << 14;
const INSIDE: u32 = WAITING - 1;
const EPOCH: u32 = 1 << 16;

/// Most threads of a pool, far below the limit of the count in `state`.
const THREADS_MAX: usize = 1024;

/// A counter on its own cache line, so that claiming chunks does not slow threads that watch `state`.
#[repr(align(128))]
struct Apart<T>(T);

type Work = dyn Fn(usize, usize) + Sync + 'static;

#[derive(Clone, Copy)]
struct Task {
    /// Called with worker and chunk. Valid while a phase is open or a helper is inside.
    work: *const Work,
    chunks: usize,
}

struct Shared {
    state: Apart<AtomicU32>,
    sleepers: AtomicU32,
    stop: AtomicBool,
    next: Apart<AtomicUsize>,
    task: UnsafeCell<Option<Task>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `task` is written only by the pool's owner while no phase is open and no helper is inside: `Pool::run` takes
// `&mut self`. Only helpers that are inside read it; `state` orders the two. The closure behind it is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer in `task` is never dropped or written through.
unsafe impl Send for Shared {}

/// A fixed set of worker threads.
pub struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` workers including the caller: starts `threads - 1` threads.
    ///
    /// # Errors
    /// The system's error if a thread cannot be started.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            state: Apart(AtomicU32::new(0)),
            sleepers: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            next: Apart(AtomicUsize::new(0)),
            task: UnsafeCell::new(None),
            panic: Mutex::new(Rank::ThreadPool, None),
        });
        let mut pool = Self { shared, helpers: Vec::new() };
        for worker in 1..threads.clamp(1, THREADS_MAX) {
            let shared = Arc::clone(&pool.shared);
            let helper = std::thread::Builder::new()
                .name(format!("compute-{worker}"))
                .spawn(move || shared.help(worker))?;
            pool.helpers.push(helper);
        }
        Ok(pool)
    }

    /// Number of workers, including the caller.
    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Calls `work(worker, chunk)` once for each chunk below `chunks`, on all workers, and returns when all are done.
    ///
    /// No two calls with the same `worker` overlap. Costs 0.2-1 us while helpers are awake, one futex call when they
    /// sleep. With one chunk or one thread, the caller does all the work.
    ///
    /// # Panics
    /// If `work` panics: with the payload of the first panic, after all workers left. The pool stays usable.
    pub fn run(&mut self, chunks: usize, work: impl Fn(usize, usize) + Sync) {
        if chunks <= 1 || self.helpers.is_empty() {
            (0..chunks).for_each(|chunk| work(0, chunk));
            return;
        }
        let work: &(dyn Fn(usize, usize) + Sync) = &work;
        // SAFETY: only the lifetime changes. Helpers use the pointer only while inside the phase, and this function
        // neither returns nor unwinds before `close` has seen the last helper leave.
        let work = unsafe { std::mem::transmute::<*const (dyn Fn(usize, usize) + Sync), *const Work>(work) };
        let task = Task { work, chunks };
        self.open(task);
        let own = catch_unwind(AssertUnwindSafe(|| self.shared.claim(0, task)));
        if own.is_err() {
            self.shared.next.0.store(chunks, Ordering::Relaxed);
        }
        self.close();
        let helper = self.shared.panic.lock().take();
        if let Some(payload) = own.err().or(helper) {
            resume_unwind(payload);
        }
    }

    /// As [`run`](Self::run), with one of `locals` for each worker.
    ///
    /// # Panics
    /// If there are fewer locals than workers, and as `run`.
    pub fn run_with<L: Send>(
        &mut self,
        locals: &mut [L],
        chunks: usize,
        work: impl Fn(&mut L, usize) + Sync,
    ) {
        assert!(locals.len() >= self.threads(), "one local for each worker");
        let locals = Parts::new(locals);
        self.run(chunks, |worker, chunk| {
            // SAFETY: calls with the same worker never overlap (`run`), and this worker takes no other local.
            let local = unsafe { locals.take(worker..worker + 1) };
            work(&mut local[0], chunk);
        });
    }

    /// Calls `work(index, item)` once for each of `items`, on all workers.
    ///
    /// # Panics
    /// As [`run`](Self::run).
    pub fn run_items<T: Send>(&mut self, items: &mut [T], work: impl Fn(usize, &mut T) + Sync) {
        let count = items.len();
        let items = Parts::new(items);
        self.run(count, |_, index| {
            // SAFETY: each index is one chunk, and each chunk runs once.
            let item = unsafe { items.take(index..index + 1) };
            work(index, &mut item[0]);
        });
    }

    fn open(&mut self, task: Task) {
        // SAFETY: no phase is open and no helper is inside: `close` ended the last phase, and `&mut self` excludes
        // another.
        unsafe { *self.shared.task.get() = Some(task) };
        self.shared.next.0.store(0, Ordering::Relaxed);
        let epoch = (self.shared.state.0.load(Ordering::Relaxed) & !(EPOCH - 1)).wrapping_add(EPOCH);
        self.shared.state.0.store(epoch | OPEN, Ordering::SeqCst);
        if self.shared.sleepers.load(Ordering::SeqCst) > 0 {
            self.shared.wake();
        }
    }

    /// Ends the phase: admits no more helpers, and waits for those inside.
    fn close(&mut self) {
        let state = &self.shared.state.0;
        let mut seen = state.fetch_and(!OPEN, Ordering::AcqRel) & !OPEN;
        let mut spin = Spin::default();
        while seen & INSIDE > 0 {
            if spin.go_on() {
                seen = state.load(Ordering::Acquire);
                continue;
            }
            seen = state.fetch_or(WAITING, Ordering::AcqRel) | WAITING;
            if seen & INSIDE > 0 {
                // Woken early, interrupted or too late: the loop checks again.
                let _ = futex::wait(state, futex::Flags::PRIVATE, seen, None);
                seen = state.load(Ordering::Acquire);
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.state.0.fetch_add(EPOCH, Ordering::SeqCst);
        self.shared.wake();
        for helper in self.helpers.drain(..) {
            // `help` catches a helper's panics, so the result says nothing.
            let _ = helper.join();
        }
    }
}

impl Shared {
    /// Main loop of a helper.
    fn help(&self, worker: usize) {
        let mut done = None;
        while let Some(epoch) = self.enter(done) {
            done = Some(epoch);
            // SAFETY: this helper is inside (`enter`), so the task was written before and does not change.
            let task = unsafe { *self.task.get() };
            if let Some(task) = task
                && let Err(payload) = catch_unwind(AssertUnwindSafe(|| self.claim(worker, task)))
            {
                self.next.0.store(task.chunks, Ordering::Relaxed);
                self.panic.lock().get_or_insert(payload);
            }
            let before = self.state.0.fetch_sub(1, Ordering::AcqRel);
            if before & WAITING != 0 && before & INSIDE == 1 {
                self.wake();
            }
        }
    }

    /// Waits for an open phase other than `done` and registers this helper as inside; `None` when the pool ends.
    fn enter(&self, done: Option<u32>) -> Option<u32> {
        let mut spin = Spin::default();
        loop {
            let seen = self.state.0.load(Ordering::Acquire);
            if self.stop.load(Ordering::Relaxed) {
                return None;
            }
            if is_news(seen, done) {
                let inside =
                    self.state.0.compare_exchange_weak(seen, seen + 1, Ordering::AcqRel, Ordering::Relaxed);
                if inside.is_ok() {
                    return Some(seen / EPOCH);
                }
                continue;
            }
            if !spin.go_on() {
                self.sleep(done);
                spin = Spin::default();
            }
        }
    }

    /// Sleeps unless a new phase is open. `open` and this function each write, then read what the other wrote, all
    /// SeqCst: at least one of them sees the other's write.
    fn sleep(&self, done: Option<u32>) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let seen = self.state.0.load(Ordering::SeqCst);
        if !is_news(seen, done) && !self.stop.load(Ordering::SeqCst) {
            // Fails if `state` has changed from `seen`; the caller then checks again.
            let _ = futex::wait(&self.state.0, futex::Flags::PRIVATE, seen, None);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake(&self) {
        // Can fail only for an address outside the process.
        let _ = futex::wake(&self.state.0, futex::Flags::PRIVATE, i32::MAX as u32);
    }

    /// Runs chunks until none is left.
    fn claim(&self, worker: usize, task: Task) {
        // SAFETY: the caller is inside the phase, or is `run` itself, which keeps the closure alive.
        let work = unsafe { &*task.work };
        loop {
            let chunk = self.next.0.fetch_add(1, Ordering::Relaxed);
            if chunk >= task.chunks {
                return;
            }
            work(worker, chunk);
        }
    }
}

/// Whether an open phase is not the one this helper worked on last.
fn is_news(state: u32, done: Option<u32>) -> bool {
    state & OPEN != 0 && done != Some(state / EPOCH)
}

/// Spinning for at most [`SPIN`].
#[derive(Default)]
struct Spin {
    turns: u32,
    until: Option<Instant>,
}

impl Spin {
    /// One short pause; false once the time is over.
    fn go_on(&mut self) -> bool {
        std::hint::spin_loop();
        self.turns = self.turns.wrapping_add(1);
        if !self.turns.is_multiple_of(64) {
            return true;
        }
        let now = Instant::now();
        now < *self.until.get_or_insert(now + SPIN)
    }
}

/// A slice from which concurrent workers take disjoint parts.
pub struct Parts<'a, T> {
    base: *mut T,
    len: usize,
    slice: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]`; its parts go to other threads, which `T: Send` allows.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    /// Borrows `slice` for a phase.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self { base: slice.as_mut_ptr(), len: slice.len(), slice: std::marker::PhantomData }
    }

    /// Returns the part `range`.
    ///
    /// # Safety
    /// No overlapping part may live at the same time.
    ///
    /// # Panics
    /// If `range` does not lie in the slice.
    #[allow(clippy::mut_from_ref)] // intended; the safety clause makes it sound
    pub unsafe fn take(&self, range: std::ops::Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part outside the slice");
        // SAFETY: the range lies in the slice that `self` borrows mutably; the caller keeps parts disjoint.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_runs_once_whatever_the_threads() {
        for threads in 1..5 {
            let mut pool = Pool::new(threads).unwrap();
            for chunks in [0, 1, 2, 3, 64, 1000] {
                let counts: Vec<AtomicUsize> = (0..chunks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(chunks, |worker, chunk| {
                    assert!(worker < threads);
                    counts[chunk].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{threads} {chunks}");
            }
        }
    }

    #[test]
    fn phases_follow_each_other_and_see_what_the_last_one_wrote() {
        let mut pool = Pool::new(3).unwrap();
        let mut values = vec![0u64; 97];
        // More phases than the 65,536 epochs, so that the counter wraps.
        for round in 0..70_000u64 {
            let parts = Parts::new(&mut values);
            pool.run(97, |_, chunk| {
                // SAFETY: chunks are disjoint elements.
                let part = unsafe { parts.take(chunk..chunk + 1) };
                part[0] += round ^ chunk as u64;
            });
        }
        for (chunk, &value) in values.iter().enumerate() {
            assert_eq!(value, (0..70_000u64).map(|round| round ^ chunk as u64).sum::<u64>());
        }
    }

    #[test]
    fn sleeping_helpers_are_woken() {
        let mut pool = Pool::new(2).unwrap();
        for _ in 0..20 {
            std::thread::sleep(SPIN * 20);
            let helped = AtomicBool::new(false);
            let begin = Instant::now();
            // Chunk 0 ends only after another worker takes chunk 1: without a wake-up the test would hang.
            pool.run(2, |_, chunk| {
                if chunk == 1 {
                    helped.store(true, Ordering::Release);
                }
                while !helped.load(Ordering::Acquire) {
                    assert!(begin.elapsed() < Duration::from_secs(60), "the helper never came");
                    std::thread::yield_now();
                }
            });
        }
    }

    #[test]
    fn a_panic_in_any_worker_reaches_the_caller_and_the_pool_goes_on() {
        let mut pool = Pool::new(3).unwrap();
        for bad in [0, 5, 63] {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(64, |_, chunk| assert!(chunk != bad, "chunk {chunk} fails"));
            }));
            let payload = caught.expect_err("the panic is passed on");
            assert_eq!(payload.downcast_ref::<String>().unwrap(), &format!("chunk {bad} fails"));
            let sum = AtomicUsize::new(0);
            pool.run(64, |_, chunk| {
                sum.fetch_add(chunk, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 63 * 64 / 2);
        }
    }

    #[test]
    fn locals_belong_to_one_worker_each() {
        let mut pool = Pool::new(2).unwrap();
        let mut locals = vec![0usize; 2];
        pool.run_with(&mut locals, 1000, |local, chunk| *local += chunk);
        assert_eq!(locals.iter().sum::<usize>(), 999 * 1000 / 2);
    }
}
