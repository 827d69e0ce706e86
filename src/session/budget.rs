//! The memory and descriptors that users' requests and answers take, shared by [`Shares`].
//!
//! A request's payload is charged before it is allocated, until the request is answered. So frames that never end, and
//! requests that wait for a turn, cannot fill the memory. Answers that the client has not read are charged by the
//! [`Outbox`](super::Outbox), in a ledger of their own. A user whose share of requests is full still gets its answers.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::share::{Charge, Refusal, Shares, Taker};

/// Payloads up to this many bytes are not charged. All 64 streams of a connection together take 64 KiB by them.
const FREE_BYTES: u32 = 1 << 10;

/// Most open requests of all users. Each takes about 4 KiB, with a payload that is not charged.
const OPEN_MAX: u64 = 1 << 16;

/// Most requests of all users whose answers have a form. Each takes a few MiB, and at most about 12.
const FORMS_MAX: u64 = 512;

/// A reader that waits for room looks again after this time, then after twice as long, and so on.
const LOOK_FIRST: Duration = Duration::from_millis(5);
const LOOK_MAX: Duration = Duration::from_millis(160);

/// Memory and descriptors that all users' requests and answers share.
#[derive(Debug)]
pub struct Budget {
    /// Bytes of payloads of unanswered requests.
    requests: Arc<Shares>,
    /// Bytes of answers that clients have not read.
    answers: Arc<Shares>,
    /// Descriptors of unanswered requests.
    descriptors: Arc<Shares>,
    /// Number of open requests.
    open: Arc<Shares>,
    /// Number of requests whose answers have a form.
    forms: Arc<Shares>,
}

/// One user's access to the [`Budget`].
#[derive(Clone, Debug)]
pub struct UserBudget {
    requests: Arc<Shares>,
    descriptors: Arc<Shares>,
    taker: Taker,
}

/// A request's shares, held until it is answered.
#[derive(Debug, Default)]
pub struct Held {
    /// For its payload.
    pub payload: Option<Charge>,
    /// For its descriptors.
    pub descriptors: Option<Charge>,
    /// As one of all open requests.
    pub open: Option<Charge>,
}

impl Budget {
    /// `bytes` for payloads and as many for answers.
    pub(super) fn new(bytes: u64, descriptors: u64) -> Self {
        Self {
            requests: Shares::new(bytes),
            answers: Shares::new(bytes),
            descriptors: Shares::new(descriptors),
            open: Shares::new(OPEN_MAX),
            forms: Shares::new(FORMS_MAX),
        }
    }

    /// The budget as that user sees it.
    pub fn room(&self, uid: u32) -> UserBudget {
        UserBudget {
            requests: Arc::clone(&self.requests),
            descriptors: Arc::clone(&self.descriptors),
            taker: Taker::of(uid),
        }
    }

    /// Counts an open request of that user.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(super) fn open(&self, uid: u32) -> Result<Charge, Refusal> {
        self.open.take(Taker::of(uid), 1)
    }

    /// Counts a request of that user whose answer has a form.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(super) fn form(&self, uid: u32) -> Result<Charge, Refusal> {
        self.forms.take(Taker::of(uid), 1)
    }

    /// An empty charge for that user's unread answers.
    pub fn answers(&self, uid: u32) -> Option<Charge> {
        self.answers.take(Taker::of(uid), 0).ok() // nothing is never refused
    }

    /// Holdings of each user: bytes of requests and of answers, descriptors, open requests.
    pub(super) fn holdings(&self) -> [Vec<(u32, u64)>; 4] {
        [&self.requests, &self.answers, &self.descriptors, &self.open].map(|shares| shares.holdings())
    }
}

impl UserBudget {
    /// The user.
    pub fn uid(&self) -> u32 {
        self.taker.uid
    }

    /// Takes what a payload needs; waits for it up to `patience`.
    ///
    /// # Errors
    /// The last [`Refusal`].
    pub async fn payload(&self, bytes: u32, patience: Duration) -> Result<Option<Charge>, Refusal> {
        if bytes <= FREE_BYTES {
            return Ok(None);
        }
        let deadline = Instant::now() + patience;
        let mut look = LOOK_FIRST;
        loop {
            match self.requests.take(self.taker, bytes.into()) {
                Ok(charge) => return Ok(Some(charge)),
                Err(refusal) if Instant::now() >= deadline => return Err(refusal),
                Err(_) => {}
            }
            tokio::time::sleep_until(deadline.min(Instant::now() + look)).await;
            look = (look * 2).min(LOOK_MAX);
        }
    }

    /// Takes what arrived descriptors need.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn descriptors(&self, count: usize) -> Result<Option<Charge>, Refusal> {
        match count {
            0 => Ok(None),
            count => self.descriptors.take(self.taker, count as u64).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_payload_waits_for_room_and_small_ones_need_none() {
        let budget = Budget::new(64 << 10, 8);
        let (one, other) = (budget.room(54_321), budget.room(54_322));
        let patience = Duration::from_millis(200);
        let held = one.payload(30 << 10, patience).await.unwrap();
        assert!(one.payload(FREE_BYTES, patience).await.unwrap().is_none());
        let begun = Instant::now();
        let refusal = one.payload(2 << 10, patience).await.unwrap_err();
        assert_eq!(refusal.own, 30 << 10);
        assert!(begun.elapsed() >= patience);
        assert!(other.payload(15 << 10, patience).await.unwrap().is_some(), "another user finds room");
        let waits = tokio::spawn(async move { one.payload(2 << 10, 100 * patience).await.map(drop) });
        tokio::time::sleep(patience / 2).await;
        assert!(!waits.is_finished());
        drop(held);
        assert!(waits.await.unwrap().is_ok());
        assert_eq!(other.descriptors(4).map(drop), Ok(()));
        assert!(other.descriptors(5).is_err());
        let open: Vec<Charge> = std::iter::from_fn(|| budget.open(54_321).ok()).collect();
        assert_eq!(open.len() as u64, OPEN_MAX / 32 * 15, "half of what the reserve leaves");
        assert!(budget.open(54_322).is_ok());
    }
}
