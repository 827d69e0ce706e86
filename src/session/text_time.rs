//! Processor time of text work (tokenising, detokenising, rendering templates) and of opening passed files. Long texts
//! and vocabularies must not slow the engine's threads down.
//!
//! Each user has an allowance of processor time, which grows with time up to [`SAVED`] of it. Work within the allowance
//! runs at once. Other work runs in the background: few threads, with low scheduling priority, one for each user at a
//! time. An idle machine runs both equally fast.
//!
//! Passed files are always opened with low priority. A vocabulary of 1.5 million tokens takes a second, and nothing tells
//! before. With normal priority until the allowance was used up, the slowest of 100 short answers took four times as long
//! as beside a fair neighbour.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::turns::{Turn, Turns};
use crate::aside::thread_time;
use crate::lock::{Mutex, Rank};

/// The part of all processors' time that a user's allowance grows by.
const GROWS: f64 = 1.0 / 40.0;
/// The allowance grows for at most this long: 100 ms of each processor, 1 MB of text on two.
const SAVED: Duration = Duration::from_secs(4);
/// A user owes at most this many times what it may save: after 20 s it owes nothing.
const OWED: f64 = 5.0;
/// Assumed time of a byte of text, until it was measured; the slowest tokenizer took 0.2 µs.
const BYTE: Duration = Duration::from_nanos(200);
/// Time that any work takes, whatever its length.
const LEAST: Duration = Duration::from_micros(20);

/// The niceness of background threads: the engine's get ten times as much time.
const NICE: i32 = 10;
/// One background thread for this many processors.
const PROCESSORS_PER_THREAD: usize = 4;

/// Passed files of one user that are opened at a time.
const HEADERS_OF_UID: usize = 2;

/// With allowances of more users than this, full ones are forgotten.
const USERS_KEPT: usize = 64;

/// Allowances of all users, and turns in the background.
#[derive(Debug)]
pub(super) struct TextTime {
    allowances: Mutex<HashMap<u32, Allowance>>,
    /// Growth in seconds per second, and the most of it that is saved.
    grows: f64,
    saved: f64,
    background: Arc<Turns>,
    headers: Arc<Turns>,
}

/// Seconds that a user had left at that time.
#[derive(Clone, Copy, Debug)]
struct Allowance {
    left: f64,
    at: Instant,
}

/// Work in progress within an allowance: when it drops, the time that this thread took replaces the assumed time.
#[derive(Debug)]
pub(super) struct Claim<'a> {
    time: &'a TextTime,
    uid: u32,
    assumed: Duration,
    begun: Duration,
}

impl TextTime {
    /// For a machine with that many processors.
    pub(super) fn new(processors: usize) -> Self {
        let grows = GROWS * processors as f64;
        Self {
            allowances: Mutex::new(Rank::TextTime, HashMap::new()),
            grows,
            saved: grows * SAVED.as_secs_f64(),
            background: Turns::new(processors.div_ceil(PROCESSORS_PER_THREAD), 1),
            // No bound of all: a file whose disk is slow must not keep other users from opening theirs.
            headers: Turns::new(tokio::sync::Semaphore::MAX_PERMITS, HEADERS_OF_UID),
        }
    }

    /// Takes the time that a text of this length is assumed to need from the user's allowance; `None` if the allowance
    /// is too small.
    pub(super) fn claim(&self, uid: u32, bytes: usize) -> Option<Claim<'_>> {
        let assumed = assumed(bytes);
        self.take(uid, assumed, Instant::now()).then(|| Claim {
            time: self,
            uid,
            assumed,
            begun: thread_time(),
        })
    }

    /// Takes the time if the user has it.
    fn take(&self, uid: u32, time: Duration, now: Instant) -> bool {
        let mut allowances = self.allowances.lock();
        let left = self.left(allowances.get(&uid), now);
        let taken = left >= time.as_secs_f64();
        if taken {
            allowances.insert(uid, Allowance { left: left - time.as_secs_f64(), at: now });
        }
        if allowances.len() > USERS_KEPT {
            allowances.retain(|_, allowance| self.left(Some(allowance), now) < self.saved);
        }
        taken
    }

    /// Seconds left of an allowance; a user without one has a full one.
    fn left(&self, allowance: Option<&Allowance>, now: Instant) -> f64 {
        allowance.map_or(self.saved, |allowance| {
            let idle = now.saturating_duration_since(allowance.at).as_secs_f64();
            (allowance.left + idle * self.grows).min(self.saved)
        })
    }

    /// The processor time that each user's allowance has yet to grow by, where that is more than none.
    pub(super) fn used(&self) -> Vec<(u32, Duration)> {
        let (allowances, now) = (self.allowances.lock(), Instant::now());
        let used =
            |allowance| Duration::from_secs_f64((self.saved - self.left(Some(allowance), now)).max(0.0));
        let used = allowances.iter().map(|(uid, allowance)| (*uid, used(allowance)));
        used.filter(|(_, time)| !time.is_zero()).collect()
    }

    /// Charges time that another process took for a user's work.
    pub(super) fn charge(&self, uid: u32, time: Duration) {
        self.correct(uid, Duration::ZERO, time, Instant::now());
    }

    /// Whether the user's allowance has that much left for a text of this length.
    pub(super) fn may_claim(&self, uid: u32, bytes: usize) -> bool {
        self.left(self.allowances.lock().get(&uid), Instant::now()) >= assumed(bytes).as_secs_f64()
    }

    /// Replaces an assumed time by the measured one. A user owes at most [`OWED`] times as much as it may save.
    fn correct(&self, uid: u32, assumed: Duration, measured: Duration, now: Instant) {
        let mut allowances = self.allowances.lock();
        let left = self.left(allowances.get(&uid), now) + assumed.as_secs_f64() - measured.as_secs_f64();
        allowances.insert(uid, Allowance { left: left.clamp(-OWED * self.saved, self.saved), at: now });
    }

    /// Runs work on a background thread once it is the user's turn. Work that has begun runs to its end, even if no
    /// caller waits for it any more. `None` if it panicked.
    ///
    /// # Errors
    /// The error of starting a thread.
    pub(super) async fn in_background<T: Send + 'static>(
        &self,
        uid: u32,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> std::io::Result<Option<T>> {
        self.on_nice_thread(self.background.take(uid).await, work).await
    }

    /// Waits for the user's turn to open a passed file.
    pub(super) async fn header_turn(&self, uid: u32) -> Turn {
        self.headers.take(uid).await
    }

    /// Runs work on a thread of low priority. `None` if it panicked.
    ///
    /// # Errors
    /// The error of starting a thread.
    pub(super) async fn on_nice_thread<T: Send + 'static>(
        &self,
        turn: Turn,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> std::io::Result<Option<T>> {
        let (done, result) = oneshot::channel();
        std::thread::Builder::new().name("text".into()).spawn(move || {
            // Only less urgent: without it the work is done all the same.
            let _ = rustix::process::setpriority_process(None, NICE);
            let value = work();
            drop(turn);
            let _ = done.send(value); // the caller may have left
        })?;
        Ok(result.await.ok())
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let measured = thread_time().saturating_sub(self.begun).max(LEAST);
        self.time.correct(self.uid, self.assumed, measured, Instant::now());
    }
}

/// Time that a text of this length is assumed to need.
fn assumed(bytes: usize) -> Duration {
    LEAST.saturating_add(BYTE.saturating_mul(u32::try_from(bytes).unwrap_or(u32::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn an_allowance_is_used_up_grows_again_and_is_each_users_own() {
        let (time, now) = (TextTime::new(2), Instant::now());
        assert!(time.take(1, 150 * MS, now));
        assert!(!time.take(1, 60 * MS, now), "200 ms are saved at most");
        assert!(time.take(2, 200 * MS, now));
        assert!(!time.take(1, 60 * MS, now + 190 * MS), "it grows by 50 ms a second");
        assert!(time.take(1, 60 * MS, now + 210 * MS));
        time.correct(1, 60 * MS, 10 * MS, now + 210 * MS);
        assert!(time.take(1, 50 * MS, now + 210 * MS), "it took less than assumed");
        time.correct(2, 200 * MS, 1000 * MS, now);
        assert!(!time.take(2, MS, now + 15_900 * MS), "it took more, and waits until that has grown again");
        assert!(time.take(2, MS, now + 16_100 * MS));
        time.correct(3, Duration::ZERO, 60_000 * MS, now);
        assert!(!time.take(3, MS, now + 19_900 * MS));
        assert!(time.take(3, MS, now + 20_100 * MS), "but it owes no more than five times what it may save");
    }

    #[test]
    fn a_claim_measures_its_thread_and_a_refused_one_gives_nothing_back() {
        let time = TextTime::new(2);
        let claim = time.claim(1, 900_000).unwrap();
        assert!(time.claim(1, 900_000).is_none());
        assert!(time.claim(1, 900_000).is_none(), "a refusal gave nothing back");
        drop(claim);
        time.charge(1, 50 * MS);
        let left = time.left(time.allowances.lock().get(&1), Instant::now());
        assert!((0.12..=0.16).contains(&left), "{left} of 0.2 s after 50 ms elsewhere");
        let used = time.used();
        assert!(used.len() == 1 && (40..=80).contains(&used[0].1.as_millis()), "{used:?}");
    }

    #[test]
    fn users_with_whole_allowances_are_forgotten() {
        let (time, now) = (TextTime::new(2), Instant::now());
        for uid in 0..10 * USERS_KEPT as u32 {
            assert!(time.take(uid, MS, now + MS * uid * 50));
        }
        assert!(time.allowances.lock().len() <= USERS_KEPT + 1);
    }

    #[tokio::test]
    async fn background_work_is_nice_and_one_of_a_user_runs_at_a_time() {
        let time = Arc::new(TextTime::new(2));
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let own = nice();
        let (inside, goes_on) = std::sync::mpsc::channel::<()>();
        let first = tokio::spawn({
            let time = Arc::clone(&time);
            async move { time.in_background(1, move || (nice(), goes_on.recv())).await.unwrap() }
        });
        tokio::task::yield_now().await;
        let second = time.in_background(1, || 2);
        let mut second = Box::pin(second);
        assert!(futures_util::poll!(&mut second).is_pending());
        inside.send(()).unwrap();
        assert_eq!(first.await.unwrap().unwrap().0, own.max(NICE));
        assert_eq!(second.await.unwrap(), Some(2));
        assert_eq!(time.in_background(1, || panic!("as a test")).await.unwrap(), None::<()>);
        assert_eq!(nice(), own, "this thread stays as it was");
    }

    #[tokio::test]
    async fn headers_are_opened_in_turn_and_with_low_priority() {
        let time = TextTime::new(2);
        let first = time.header_turn(1).await;
        let _second = time.header_turn(1).await;
        let mut third = Box::pin(time.header_turn(1));
        assert!(futures_util::poll!(&mut third).is_pending(), "two of one user at a time");
        let _another = time.header_turn(2).await; // does not wait
        let nice = || rustix::process::getpriority_process(None).unwrap();
        assert_eq!(time.on_nice_thread(first, nice).await.unwrap(), Some(nice().max(NICE)));
        let _third = third.await; // the first gave its turn back
    }
}
