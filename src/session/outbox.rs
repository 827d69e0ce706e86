//! Frames on their way to one client: a queue with a hard end.
//!
//! The socket's writer takes frames out. Two kinds go in. What cannot wait ([`Outbox::send`]: tokens, which credit paces,
//! and answers that the reader gives itself) may be [`BYTES_MAX`], and more drops the client. What can wait
//! ([`Outbox::send_in_turn`]: whole answers, up to a frame each) has [`BYTES_MAX`] of its own and waits for room there, so
//! that many large answers at once are no fault of a client that reads.
//!
//! A client that does not read is given up, whatever waits: less than [`BYTES_SOFT`] read in [`SOFT_TIME`] while more than
//! that waits, or an answer waits for room, drops its connection, and only its.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_client::wire::HEADER_BYTES;
use tokio::sync::{Notify, Semaphore};

use crate::lock::{Guard, Mutex, Rank};

/// Most bytes of either kind that wait for a client, unless one frame alone is larger: then that frame.
pub const BYTES_MAX: usize = 1 << 20;

/// Bytes that may wait for long, and bytes to be read in [`SOFT_TIME`] where more wait.
pub const BYTES_SOFT: usize = 256 << 10;

/// How long more than [`BYTES_SOFT`] may wait without so much being read.
pub const SOFT_TIME: Duration = Duration::from_secs(10);

/// Bytes of frames sent in turn: one of the largest fits.
const ROOM: usize = BYTES_MAX + HEADER_BYTES;

/// Bytes handed to one write call, unless one frame is larger.
const CHUNK_BYTES: usize = 64 << 10;

#[derive(Debug, Default)]
struct State {
    frames: VecDeque<Queued>,
    /// Of `frames` and of the chunk being written.
    bytes: usize,
    /// Those of `bytes` that took room, one for each byte of it.
    in_turn: usize,
    /// Those of `in_turn` that are in the chunk being written.
    writing_in_turn: usize,
    /// Frames that wait for room.
    waiting: usize,
    /// Since when too much waits.
    over_since: Option<Instant>,
    /// Bytes written since then.
    written: usize,
    closed: bool,
    overflowed: bool,
}

/// A frame in the queue.
#[derive(Debug)]
struct Queued {
    frame: Vec<u8>,
    /// Room it took; 0 for what cannot wait.
    room: usize,
}

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    /// Bytes that more frames sent in turn may have; first come, first served.
    room: Semaphore,
    /// For the writer: there is a frame, or the end.
    readable: Notify,
    /// For the reader: nothing more can be answered.
    gone: Notify,
}

/// The queue; clones share it.
#[derive(Clone, Debug)]
pub struct Outbox(Arc<Inner>);

/// One frame that waits for room, counted until it drops.
struct Waiting<'a>(&'a Inner);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.state.lock().waiting -= 1;
    }
}

impl Default for Outbox {
    fn default() -> Self {
        let room = Semaphore::new(ROOM);
        let (readable, gone) = (Notify::new(), Notify::new());
        Self(Arc::new(Inner { state: Mutex::new(Rank::Outbox, State::default()), room, readable, gone }))
    }
}

impl Outbox {
    /// An empty queue.
    pub fn new() -> Self {
        Self::default()
    }

    /// Queues a frame at once. Ignored once closed: whoever sends learns of the end from its own cancellation.
    pub fn send(&self, frame: Vec<u8>) {
        let mut state = self.0.state.lock();
        let bytes = state.bytes.saturating_sub(state.in_turn);
        if !state.closed && bytes > 0 && bytes + frame.len() > BYTES_MAX {
            self.overflow(&mut state);
            return;
        }
        self.push(state, Queued { frame, room: 0 });
    }

    /// Queues a frame once there is room, first come first served; `before` is done right before. Ends at once when the
    /// queue is closed, without the frame.
    pub async fn send_in_turn(&self, frame: Vec<u8>, before: impl FnOnce()) {
        let room = frame.len().min(ROOM);
        let waiting = self.wait();
        let permit = self.0.room.acquire_many(u32::try_from(room).unwrap_or(u32::MAX)).await;
        drop(waiting);
        before();
        let Ok(permit) = permit else { return };
        permit.forget(); // `written` gives it back
        let mut state = self.0.state.lock();
        if !state.closed {
            state.in_turn += room;
            self.push(state, Queued { frame, room });
        }
    }

    /// From here on a frame waits for room, which the client is to make by reading.
    fn wait(&self) -> Waiting<'_> {
        let mut state = self.0.state.lock();
        state.waiting += 1;
        state.look_at(Instant::now());
        Waiting(&self.0)
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

    /// Queues a last frame; what is sent later is ignored.
    pub fn close_with(&self, frame: Vec<u8>) {
        let mut state = self.0.state.lock();
        if !state.closed {
            state.bytes += frame.len();
            state.frames.push_back(Queued { frame, room: 0 });
        }
        drop(state);
        self.close();
    }

    /// Ends the queue; what is in it is still written.
    pub fn close(&self) {
        self.0.state.lock().closed = true;
        self.0.tell_the_end();
    }

    /// True when the client read too slowly: its connection is to be dropped.
    pub fn overflowed(&self) -> bool {
        self.0.state.lock().overflowed
    }

    /// Ends when the queue is closed, by either side.
    pub async fn closed(&self) {
        loop {
            if self.0.state.lock().closed {
                return;
            }
            self.0.gone.notified().await;
        }
    }

    /// For the writer: the next bytes to write, or `None` at the end. [`Outbox::written`] must be told of them.
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

    /// For the writer: `bytes` are with the kernel now.
    pub fn written(&self, bytes: usize) {
        let mut state = self.0.state.lock();
        state.bytes = state.bytes.saturating_sub(bytes);
        let room = bytes.min(state.writing_in_turn);
        state.writing_in_turn -= room;
        state.in_turn -= room;
        state.written += bytes;
        if state.written >= BYTES_SOFT {
            state.over_since = None; // it reads: the clock starts anew
        }
        state.look_at(Instant::now());
        drop(state);
        self.0.room.add_permits(room);
    }

    /// For the writer, while it waits for the client: gives the client up when too much waits for too long.
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
        }
        self.close();
    }

    /// What waits is thrown away: it will not be read.
    fn overflow(&self, state: &mut State) {
        state.overflowed = true;
        state.closed = true;
        state.frames.clear();
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
    /// Starts the clock when too much waits, and stops it when it does not.
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

    #[tokio::test]
    async fn frames_come_out_in_order_and_the_end_after_them() {
        let outbox = Outbox::new();
        outbox.send(vec![1; 10]);
        outbox.send(vec![2; CHUNK_BYTES]);
        outbox.close_with(vec![3]);
        outbox.send(vec![4]);
        assert_eq!(outbox.next_chunk().await, Some(vec![1; 10]), "a chunk of two would be too long");
        assert_eq!(outbox.next_chunk().await.map(|c| c.len()), Some(CHUNK_BYTES));
        assert_eq!(outbox.next_chunk().await, Some(vec![3]));
        assert_eq!(outbox.next_chunk().await, None);
        outbox.closed().await;
    }

    #[tokio::test]
    async fn the_hard_limit_drops_the_client_and_counts_what_is_being_written() {
        let outbox = Outbox::new();
        outbox.send(vec![0; BYTES_MAX + 16]);
        assert!(!outbox.overflowed(), "one frame always passes");
        let chunk = outbox.next_chunk().await.unwrap();
        outbox.send(vec![0]);
        assert!(outbox.overflowed(), "the chunk is not written yet");
        outbox.written(chunk.len());
        assert_eq!(outbox.next_chunk().await, None);

        let outbox = Outbox::new();
        for _ in 0..BYTES_MAX / 1024 {
            outbox.send(vec![0; 1024]);
        }
        assert!(!outbox.overflowed());
        outbox.send(vec![0]);
        assert!(outbox.overflowed());
    }

    #[test]
    fn the_soft_limit_needs_time() {
        let outbox = Outbox::new();
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
        let outbox = Outbox::new();
        outbox.send_in_turn(vec![1; BYTES_MAX + 16], || ()).await;
        let mut second = std::pin::pin!(outbox.send_in_turn(vec![2; 600 << 10], || ()));
        assert!(futures_util::poll!(&mut second).is_pending(), "there is no room");
        outbox.send(vec![3; BYTES_MAX]);
        assert!(!outbox.overflowed(), "what cannot wait has room of its own");

        let chunk = outbox.next_chunk().await.unwrap();
        outbox.written(16 + (500 << 10));
        assert!(futures_util::poll!(&mut second).is_pending(), "too little was read");
        outbox.written(chunk.len() - 16 - (500 << 10));
        second.await;
        assert_eq!(outbox.next_chunk().await, Some(vec![3; BYTES_MAX]));
        outbox.written(BYTES_MAX);
        let chunk = outbox.next_chunk().await.unwrap();
        assert_eq!(chunk, vec![2; 600 << 10]);
        outbox.written(chunk.len());
        assert_eq!(outbox.0.room.available_permits(), ROOM, "all room is back");
        let state = outbox.0.state.lock();
        assert_eq!((state.bytes, state.in_turn, state.waiting), (0, 0, 0));
        assert_eq!(state.over_since, None);
    }

    #[tokio::test]
    async fn who_waits_for_room_learns_of_the_end() {
        let outbox = Outbox::new();
        outbox.send_in_turn(vec![1; ROOM], || ()).await;
        let mut second = std::pin::pin!(outbox.send_in_turn(vec![2], || ()));
        assert!(futures_util::poll!(&mut second).is_pending());
        outbox.close();
        second.await;
        assert_eq!(outbox.next_chunk().await, Some(vec![1; ROOM]));
        assert_eq!(outbox.next_chunk().await, None);
    }

    #[tokio::test]
    async fn an_answer_that_waits_starts_the_clock_and_reading_restarts_it() {
        let outbox = Outbox::new();
        outbox.send_in_turn(vec![1; BYTES_SOFT], || ()).await;
        outbox.check_soft_limit(Instant::now() + SOFT_TIME * 2);
        assert!(!outbox.overflowed(), "it is not much");
        let mut second = std::pin::pin!(outbox.send_in_turn(vec![2; BYTES_MAX], || ()));
        assert!(futures_util::poll!(&mut second).is_pending());
        let begun = outbox.0.state.lock().over_since.unwrap();
        let _ = outbox.next_chunk().await;
        outbox.written(BYTES_SOFT - 1);
        assert_eq!(outbox.0.state.lock().over_since, Some(begun), "a client that dawdles gains no time");
        outbox.check_soft_limit(begun + SOFT_TIME);
        assert!(outbox.overflowed());
        second.await;
    }
}
