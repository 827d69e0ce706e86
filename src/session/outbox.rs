//! The queue of frames for one client, with hard bounds.
//!
//! The socket's writer takes frames out. Two kinds go in. Frames that cannot wait ([`Outbox::send`]: tokens, which
//! credit paces, and answers from the reader itself) may take [`BYTES_MAX`]; more drops the client. Frames that can
//! wait ([`Outbox::send_in_turn`]: whole answers, up to one frame each) have another [`BYTES_MAX`] and wait for room
//! there. So many large answers at once never drop a client that reads.
//!
//! Frames that wait on all connections of a user are charged to that user's share of [`Budget`](super::budget::Budget).
//! Without room there, an answer is replaced by an error, and a frame that cannot wait drops the client.
//!
//! The daemon disconnects a client that reads too slowly, and no other. It is too slow if it reads less than
//! [`BYTES_SOFT`] in [`SOFT_TIME`] while more than that is queued or an answer waits for room.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_client::wire::HEADER_BYTES;
use tokio::sync::{Notify, Semaphore};

use crate::lock::{Guard, Mutex, Rank};
use crate::share::{Charge, Refusal};

/// Most queued bytes of either kind; a single larger frame may exceed it.
pub const BYTES_MAX: usize = 1 << 20;

/// Bytes that may stay queued for long. If more are queued, the client must read this many in [`SOFT_TIME`].
pub const BYTES_SOFT: usize = 256 << 10;

/// A client over [`BYTES_SOFT`] must read that many bytes within this time.
pub const SOFT_TIME: Duration = Duration::from_secs(10);

/// Room for frames sent in turn, in bytes: one of the largest fits.
const ROOM: usize = BYTES_MAX + HEADER_BYTES;

/// Bytes that each queue may have without a charge, and the step of a charge: a queue of tokens takes no common lock.
const FREE_BYTES: usize = 16 << 10;

/// Bytes of one write call, unless one frame is larger.
const CHUNK_BYTES: usize = 64 << 10;

#[derive(Debug, Default)]
struct State {
    frames: VecDeque<Queued>,
    /// Bytes of `frames` and of the chunk being written.
    bytes: usize,
    /// The part of `bytes` that took room, one permit for each byte.
    in_turn: usize,
    /// The part of `in_turn` that is in the chunk being written.
    writing_in_turn: usize,
    /// Number of frames that wait for room, and their bytes.
    waiting: usize,
    waiting_bytes: usize,
    /// Covers the bytes over [`FREE_BYTES`]. `None` where nothing is charged, or no longer.
    charge: Option<Charge>,
    /// Start of the time over the soft limit.
    over_since: Option<Instant>,
    /// Bytes written since `over_since`.
    written: usize,
    closed: bool,
    overflowed: bool,
}

/// A frame in the queue.
#[derive(Debug)]
struct Queued {
    frame: Vec<u8>,
    /// Room that the frame took, in bytes; 0 for a frame that cannot wait.
    room: usize,
}

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    /// Free room for frames sent in turn, in bytes; first come, first served.
    room: Semaphore,
    /// Wakes the writer: a frame is queued, or the queue is closed.
    readable: Notify,
    /// Wakes the reader: the queue is closed.
    gone: Notify,
}

/// The queue; clones share it.
#[derive(Clone, Debug)]
pub struct Outbox(Arc<Inner>);

/// One frame that waits for room, counted until it drops.
struct Waiting<'a> {
    inner: &'a Inner,
    bytes: usize,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.inner.state.lock().waits_no_more(self.bytes);
    }
}

impl Default for Outbox {
    fn default() -> Self {
        Self::new(None)
    }
}

impl Outbox {
    /// An empty queue; `charge` is the user's, and empty.
    pub fn new(charge: Option<Charge>) -> Self {
        let room = Semaphore::new(ROOM);
        let (readable, gone) = (Notify::new(), Notify::new());
        let state = Mutex::new(Rank::Outbox, State { charge, ..State::default() });
        Self(Arc::new(Inner { state, room, readable, gone }))
    }

    /// Queues a frame at once. Ignored once closed: senders learn of the end from their own cancellation.
    pub fn send(&self, frame: Vec<u8>) {
        let mut state = self.0.state.lock();
        let bytes = state.bytes.saturating_sub(state.in_turn);
        if !state.closed && bytes > 0 && bytes + frame.len() > BYTES_MAX {
            self.overflow(&mut state);
            return;
        }
        if !state.closed && state.cover(frame.len()).is_err() {
            self.overflow(&mut state);
            return;
        }
        self.push(state, Queued { frame, room: 0 });
    }

    /// Queues a frame once it has room, first come, first served. Calls `before` just before it queues the frame.
    /// Returns at once, without the frame, when the queue is closed.
    ///
    /// # Errors
    /// [`Refusal`] at once: the user's share of unread answers is full. `before` was not called.
    pub async fn send_in_turn(&self, frame: Vec<u8>, before: impl FnOnce()) -> Result<(), Refusal> {
        let room = frame.len().min(ROOM);
        let waiting = self.wait(frame.len())?;
        let permit = self.0.room.acquire_many(u32::try_from(room).unwrap_or(u32::MAX)).await;
        before();
        let Ok(permit) = permit else { return Ok(()) };
        permit.forget(); // `written` returns it
        let mut state = self.0.state.lock();
        state.waits_no_more(waiting.bytes);
        std::mem::forget(waiting); // counted out in the line before, under the same lock as the push
        if !state.closed {
            state.in_turn += room;
            self.push(state, Queued { frame, room });
        }
        Ok(())
    }

    /// Counts a frame that waits for room; the client makes room by reading.
    fn wait(&self, bytes: usize) -> Result<Waiting<'_>, Refusal> {
        let mut state = self.0.state.lock();
        if !state.closed {
            state.cover(bytes)?;
        }
        state.waiting += 1;
        state.waiting_bytes += bytes;
        state.look_at(Instant::now());
        Ok(Waiting { inner: &self.0, bytes })
    }

    fn push(&self, mut state: Guard<'_, State>, queued: Queued) {
        if state.closed {
            return;
        }
        state.bytes += queued.frame.len();
        state.frames.push_back(queued);
        state.look_at(Instant::now());
        drop(state);
        self.0.readable.notify_one();
    }

    /// Queues a last frame and closes; later frames are ignored.
    pub fn close_with(&self, frame: Vec<u8>) {
        let mut state = self.0.state.lock();
        if !state.closed {
            state.bytes += frame.len();
            state.frames.push_back(Queued { frame, room: 0 });
        }
        drop(state);
        self.close();
    }

    /// Closes the queue; frames in it are still written.
    pub fn close(&self) {
        self.0.state.lock().closed = true;
        self.0.tell_the_end();
    }

    /// True when the client read too slowly: drop its connection.
    pub fn overflowed(&self) -> bool {
        self.0.state.lock().overflowed
    }

    /// Completes when either side closed the queue.
    pub async fn closed(&self) {
        loop {
            if self.0.state.lock().closed {
                return;
            }
            self.0.gone.notified().await;
        }
    }

    /// For the writer: the next bytes to write, or `None` at the end. Report them with [`Outbox::written`].
    pub async fn next_chunk(&self) -> Option<Vec<u8>> {
        loop {
            {
                let mut state = self.0.state.lock();
                if let Some(Queued { frame: mut chunk, mut room }) = state.frames.pop_front() {
                    while let Some(next) = state.frames.front()
                        && chunk.len() + next.frame.len() <= CHUNK_BYTES
                    {
                        chunk.extend_from_slice(&next.frame);
                        room += next.room;
                        state.frames.pop_front();
                    }
                    state.writing_in_turn = room;
                    return Some(chunk);
                }
                if state.closed {
                    return None;
                }
            }
            self.0.readable.notified().await;
        }
    }

    /// For the writer: the kernel took `bytes`.
    pub fn written(&self, bytes: usize) {
        let mut state = self.0.state.lock();
        state.bytes = state.bytes.saturating_sub(bytes);
        let room = bytes.min(state.writing_in_turn);
        state.writing_in_turn -= room;
        state.in_turn -= room;
        state.written += bytes;
        if state.written >= BYTES_SOFT {
            state.over_since = None; // the client reads: restart the clock
        }
        state.look_at(Instant::now());
        state.uncover();
        drop(state);
        self.0.room.add_permits(room);
    }

    /// For the writer, while it waits for the client: disconnects a client that was over the soft limit for
    /// [`SOFT_TIME`].
    pub fn check_soft_limit(&self, now: Instant) {
        let mut state = self.0.state.lock();
        let late = state.over_since.is_some_and(|since| now.saturating_duration_since(since) >= SOFT_TIME);
        if late && !state.closed {
            self.overflow(&mut state);
        }
    }

    /// For the writer: the client is gone, nothing more can be written.
    pub fn abandon(&self) {
        {
            let mut state = self.0.state.lock();
            state.frames.clear();
            (state.bytes, state.in_turn, state.writing_in_turn) = (0, 0, 0);
            state.charge = None;
        }
        self.close();
    }

    /// Drops all queued frames: the client will not read them.
    fn overflow(&self, state: &mut State) {
        state.overflowed = true;
        state.closed = true;
        state.frames.clear();
        state.charge = None;
        self.0.tell_the_end();
    }
}

impl Inner {
    fn tell_the_end(&self) {
        self.room.close();
        self.readable.notify_one();
        self.gone.notify_one();
    }
}

impl State {
    /// The charge for `more` bytes beside those that are queued or wait.
    fn due(&self, more: usize) -> u64 {
        let bytes = self.bytes.saturating_add(self.waiting_bytes).saturating_add(more);
        (bytes.saturating_sub(FREE_BYTES).div_ceil(FREE_BYTES) * FREE_BYTES) as u64
    }

    /// Charges what `more` bytes need in addition.
    fn cover(&mut self, more: usize) -> Result<(), Refusal> {
        let due = self.due(more);
        let Some(charge) = &mut self.charge else { return Ok(()) };
        match due.saturating_sub(charge.amount()) {
            0 => Ok(()),
            missing => charge.grow(missing),
        }
    }

    /// Gives back the charge for bytes that are gone.
    fn uncover(&mut self) {
        let due = self.due(0);
        if let Some(charge) = &mut self.charge
            && charge.amount() > due
        {
            charge.shrink(charge.amount() - due);
        }
    }

    fn waits_no_more(&mut self, bytes: usize) {
        self.waiting -= 1;
        self.waiting_bytes -= bytes;
    }

    /// Starts the clock when the client is over the soft limit, and stops it when it is not.
    fn look_at(&mut self, now: Instant) {
        if self.bytes <= BYTES_SOFT && self.waiting == 0 {
            self.over_since = None;
        } else if self.over_since.is_none() {
            self.over_since = Some(now);
            self.written = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::share::{Shares, Taker};

    #[tokio::test]
    async fn frames_come_out_in_order_and_the_end_after_them() {
        let outbox = Outbox::new(None);
        outbox.send(vec![1; 10]);
        outbox.send(vec![2; CHUNK_BYTES]);
        outbox.close_with(vec![3]);
        outbox.send(vec![4]);
        assert_eq!(outbox.next_chunk().await, Some(vec![1; 10]), "both frames together exceed a chunk");
        assert_eq!(outbox.next_chunk().await.map(|c| c.len()), Some(CHUNK_BYTES));
        assert_eq!(outbox.next_chunk().await, Some(vec![3]));
        assert_eq!(outbox.next_chunk().await, None);
        outbox.closed().await;
    }

    #[tokio::test]
    async fn the_hard_limit_drops_the_client_and_counts_what_is_being_written() {
        let outbox = Outbox::new(None);
        outbox.send(vec![0; BYTES_MAX + 16]);
        assert!(!outbox.overflowed(), "one frame always passes");
        let chunk = outbox.next_chunk().await.unwrap();
        outbox.send(vec![0]);
        assert!(outbox.overflowed(), "the chunk is not written yet");
        outbox.written(chunk.len());
        assert_eq!(outbox.next_chunk().await, None);

        let outbox = Outbox::new(None);
        for _ in 0..BYTES_MAX / 1024 {
            outbox.send(vec![0; 1024]);
        }
        assert!(!outbox.overflowed());
        outbox.send(vec![0]);
        assert!(outbox.overflowed());
    }

    #[test]
    fn the_soft_limit_needs_time() {
        let outbox = Outbox::new(None);
        outbox.send(vec![0; BYTES_SOFT + 1]);
        outbox.check_soft_limit(Instant::now());
        assert!(!outbox.overflowed());
        outbox.written(1);
        outbox.check_soft_limit(Instant::now() + SOFT_TIME * 2);
        assert!(!outbox.overflowed(), "at the limit is not over it");
        outbox.send(vec![0]);
        outbox.check_soft_limit(Instant::now() + SOFT_TIME);
        assert!(outbox.overflowed());
    }

    #[tokio::test]
    async fn answers_wait_for_room_and_leave_that_of_tokens_alone() {
        let outbox = Outbox::new(None);
        outbox.send_in_turn(vec![1; BYTES_MAX + 16], || ()).await.unwrap();
        let mut second = std::pin::pin!(outbox.send_in_turn(vec![2; 600 << 10], || ()));
        assert!(futures_util::poll!(&mut second).is_pending(), "there is no room");
        outbox.send(vec![3; BYTES_MAX]);
        assert!(!outbox.overflowed(), "frames that cannot wait have room of their own");

        let chunk = outbox.next_chunk().await.unwrap();
        outbox.written(16 + (500 << 10));
        assert!(futures_util::poll!(&mut second).is_pending(), "too little was read");
        outbox.written(chunk.len() - 16 - (500 << 10));
        second.await.unwrap();
        assert_eq!(outbox.next_chunk().await, Some(vec![3; BYTES_MAX]));
        outbox.written(BYTES_MAX);
        let chunk = outbox.next_chunk().await.unwrap();
        assert_eq!(chunk, vec![2; 600 << 10]);
        outbox.written(chunk.len());
        assert_eq!(outbox.0.room.available_permits(), ROOM, "all room is free again");
        let state = outbox.0.state.lock();
        assert_eq!((state.bytes, state.in_turn, state.waiting), (0, 0, 0));
        assert_eq!(state.over_since, None);
    }

    #[tokio::test]
    async fn a_waiter_for_room_learns_of_the_end() {
        let outbox = Outbox::new(None);
        outbox.send_in_turn(vec![1; ROOM], || ()).await.unwrap();
        let mut second = std::pin::pin!(outbox.send_in_turn(vec![2], || ()));
        assert!(futures_util::poll!(&mut second).is_pending());
        outbox.close();
        second.await.unwrap();
        assert_eq!(outbox.next_chunk().await, Some(vec![1; ROOM]));
        assert_eq!(outbox.next_chunk().await, None);
    }

    #[tokio::test]
    async fn an_answer_that_waits_starts_the_clock_and_reading_restarts_it() {
        let outbox = Outbox::new(None);
        outbox.send_in_turn(vec![1; BYTES_SOFT], || ()).await.unwrap();
        outbox.check_soft_limit(Instant::now() + SOFT_TIME * 2);
        assert!(!outbox.overflowed(), "the queue is within the soft limit");
        let mut second = std::pin::pin!(outbox.send_in_turn(vec![2; BYTES_MAX], || ()));
        assert!(futures_util::poll!(&mut second).is_pending());
        let begun = outbox.0.state.lock().over_since.unwrap();
        let _ = outbox.next_chunk().await;
        outbox.written(BYTES_SOFT - 1);
        assert_eq!(outbox.0.state.lock().over_since, Some(begun), "a slow client gains no time");
        outbox.check_soft_limit(begun + SOFT_TIME);
        assert!(outbox.overflowed());
        second.await.unwrap();
    }

    #[tokio::test]
    async fn unread_bytes_are_charged_to_their_user_until_they_are_read() {
        let shares = Shares::new(4 << 20);
        let user = |uid| Some(shares.take(Taker { uid, privileged: false }, 0).unwrap());
        let outboxes: Vec<Outbox> = (0..4).map(|_| Outbox::new(user(1))).collect();
        outboxes[0].send(vec![0; FREE_BYTES]);
        assert_eq!(shares.held(), 0, "short answers need no charge");
        outboxes[0].send_in_turn(vec![1; BYTES_MAX], || ()).await.unwrap();
        assert_eq!(shares.held(), BYTES_MAX as u64);
        // Frames that wait for room count too.
        let mut waits = Box::pin(outboxes[0].send_in_turn(vec![1; 512 << 10], || ()));
        assert!(futures_util::poll!(&mut waits).is_pending());
        assert_eq!(shares.held(), 3 << 19);
        outboxes[1].send_in_turn(vec![2; 300 << 10], || ()).await.unwrap();
        let called = std::cell::Cell::new(false);
        let refused = outboxes[2].send_in_turn(vec![3; BYTES_MAX], || called.set(true)).await.unwrap_err();
        assert_eq!((refused.whose, called.get()), (crate::share::Whose::Own, false));
        outboxes[3].send(vec![4; BYTES_MAX]);
        assert!(outboxes[3].overflowed(), "a frame that cannot wait drops its client");
        let other = Outbox::new(user(2));
        other.send_in_turn(vec![5; BYTES_MAX], || ()).await.unwrap();
        other.abandon();
        for _ in 0..2 {
            let chunk = outboxes[0].next_chunk().await.unwrap();
            outboxes[0].written(chunk.len());
        }
        waits.await.unwrap();
        let chunk = outboxes[0].next_chunk().await.unwrap();
        outboxes[0].written(chunk.len());
        assert_eq!(shares.held(), 288 << 10, "of the second connection");
        drop(outboxes);
        assert_eq!(shares.held(), 0);
    }
}
