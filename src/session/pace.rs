//! Paces the frames of each user, so that many cheap requests of one user do not slow all others down.
//!
//! Runtime threads go round by connection, and a user may have thousands. So each user pays for the processor time that
//! its frames take. The daemon does not read its next frame before those are paid for. Users pay with time: a part of
//! all processors' time, which grows while they are quiet, up to [`SAVED`] of it. Administrators do not pay.

use std::collections::HashMap;
use std::pin::pin;
use std::time::{Duration, Instant};

use crate::aside::thread_time;
use crate::lock::{Mutex, Rank};

/// The part of all processors' time that a user pays with.
const PART: f64 = 1.0 / 16.0;
/// Longest time that a user saves: 15 ms of processor time for each processor, some 1,000 frames. With four times as much, three
/// users who spent it at once made others wait for half a second.
const SAVED: Duration = Duration::from_millis(250);
/// Time of receiving a frame and of sending an answer, which is not measured.
const FRAME: Duration = Duration::from_micros(10);
/// Users that are remembered; of more, those that have saved all they may are forgotten.
const USERS_KEPT: usize = 64;

/// The thread's time is asked for only where a payload has more bytes: that is a system call, twice a frame.
const SMALL_BYTES: usize = 4 << 10;
/// A frame with fewer bytes takes less. It may have lost the processor for longer, and does not pay for that.
const SMALL: Duration = Duration::from_micros(200);

/// Measures the processor time of a frame.
pub(super) enum Begun {
    Small(Instant),
    /// The thread's time.
    Large(Duration),
}

impl Begun {
    /// Begins with a frame of so many bytes.
    pub(super) fn with(bytes: usize) -> Self {
        if bytes <= SMALL_BYTES { Self::Small(Instant::now()) } else { Self::Large(thread_time()) }
    }

    /// The frame's time so far.
    pub(super) fn took(&self) -> Duration {
        match self {
            Self::Small(begun) => begun.elapsed().min(SMALL),
            Self::Large(begun) => thread_time().saturating_sub(*begun),
        }
    }
}

/// Accounts of all users.
#[derive(Debug)]
pub(super) struct Pace {
    /// Processor time per time.
    rate: f64,
    /// When each user has paid for all that it took.
    paid: Mutex<HashMap<u32, Instant>>,
}

impl Pace {
    /// For a machine with that many processors.
    pub(super) fn new(processors: usize) -> Self {
        Self { rate: PART * processors as f64, paid: Mutex::new(Rank::Pace, HashMap::new()) }
    }

    /// Charges a user for a frame that took so much time on this thread. Returns when the next one may be read, if that
    /// is not now.
    pub(super) fn frame(&self, uid: u32, took: Duration) -> Option<Instant> {
        self.charge(uid, took.saturating_add(FRAME), Instant::now())
    }

    fn charge(&self, uid: u32, took: Duration, now: Instant) -> Option<Instant> {
        let least = now.checked_sub(SAVED).unwrap_or(now);
        let mut paid = self.paid.lock();
        if paid.len() >= USERS_KEPT {
            paid.retain(|_, until| *until > least);
        }
        let until = paid.entry(uid).or_insert(least);
        *until = (*until).max(least) + took.div_f64(self.rate);
        (*until > now).then_some(*until)
    }

    /// The processor time that each user has yet to make up for, where that is more than none.
    pub(super) fn used(&self) -> Vec<(u32, Duration)> {
        let now = Instant::now();
        let least = now.checked_sub(SAVED).unwrap_or(now);
        let paid = self.paid.lock();
        let used =
            paid.iter().map(|(uid, until)| (*uid, until.saturating_duration_since(least).mul_f64(self.rate)));
        used.filter(|(_, time)| !time.is_zero()).collect()
    }

    /// Runs work of a user on the runtime's threads, and charges the processor time of each turn that it gets.
    pub(super) async fn paid<T>(&self, uid: u32, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        std::future::poll_fn(|context| {
            let begun = thread_time();
            let polled = work.as_mut().poll(context);
            self.charge(uid, thread_time().saturating_sub(begun), Instant::now());
            polled
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_user_that_takes_much_waits_and_others_do_not() {
        let (pace, now) = (Pace::new(16), Instant::now());
        // With 16 processors the rate is one second per second.
        assert_eq!(pace.charge(1, SAVED, now), None, "saved");
        assert_eq!(pace.charge(1, 5 * MS, now), Some(now + 5 * MS));
        assert_eq!(pace.charge(1, 5 * MS, now), Some(now + 10 * MS), "one after the other");
        assert_eq!(pace.charge(2, 5 * MS, now), None);
        assert_eq!(pace.charge(1, MS, now + 11 * MS), None, "paid");
        assert_eq!(pace.charge(1, MS, now + 11 * MS), Some(now + 12 * MS));
    }

    #[test]
    fn quiet_users_are_forgotten_and_nothing_is_lost_by_that() {
        let (pace, now) = (Pace::new(2), Instant::now());
        for uid in 0..2 * USERS_KEPT as u32 {
            pace.charge(uid, MS, now);
        }
        assert_eq!(pace.paid.lock().len(), 2 * USERS_KEPT, "all have yet to pay");
        pace.charge(7, MS, now + 2 * SAVED);
        assert_eq!(pace.paid.lock().len(), 1);
    }

    #[test]
    fn a_small_frame_pays_for_the_clock_and_a_large_one_for_the_processor() {
        let (small, large) = (Begun::with(SMALL_BYTES), Begun::with(SMALL_BYTES + 1));
        std::thread::sleep(20 * MS);
        assert_eq!(small.took(), SMALL, "the rest of the time was another thread's");
        assert!(large.took() < 10 * MS, "{:?}", large.took());
    }

    #[tokio::test]
    async fn work_is_charged_for_its_time_on_the_processor() {
        let pace = Pace::new(16);
        let spin = async {
            let begun = thread_time();
            while thread_time().saturating_sub(begun) < 200 * MS {}
            7
        };
        let saved = |uid| Instant::now().saturating_duration_since(*pace.paid.lock().get(&uid).unwrap());
        assert_eq!(pace.paid(1, spin).await, 7);
        assert!(saved(1) < SAVED - 100 * MS, "{:?}", saved(1));
        assert!(pace.used()[0].1 > 100 * MS, "{:?}", pace.used());
        pace.paid(2, tokio::time::sleep(200 * MS)).await;
        assert!(saved(2) > SAVED - 100 * MS, "{:?}", saved(2));
    }
}
