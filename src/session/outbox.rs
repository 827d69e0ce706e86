//! Frames on their way to one client: a queue with a hard end.
//!
//! Sessions put frames in and never wait. The socket's writer takes them out. A client that does not read is given up:
//! more than [`BYTES_MAX`] waiting, or more than [`BYTES_SOFT`] for [`SOFT_TIME`], drops its connection, and only its.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Most bytes that wait for a client, unless one frame alone is larger: then that frame.
pub const BYTES_MAX: usize = 1 << 20;

/// Bytes that may wait for long.
pub const BYTES_SOFT: usize = 256 << 10;

/// How long more than [`BYTES_SOFT`] may wait.
pub const SOFT_TIME: Duration = Duration::from_secs(10);

/// Bytes handed to one write call, unless one frame is larger.
const CHUNK_BYTES: usize = 64 << 10;

#[derive(Debug, Default)]
struct State {
    frames: VecDeque<Vec<u8>>,
    /// Of `frames` and of the chunk being written.
    bytes: usize,
    /// Since when more than [`BYTES_SOFT`] wait.
    over_since: Option<Instant>,
    closed: bool,
    overflowed: bool,
}

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    /// For the writer: there is a frame, or the end.
    readable: Notify,
    /// For the reader: nothing more can be answered.
    gone: Notify,
}

/// The queue; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Outbox(Arc<Inner>);

impl Outbox {
    /// An empty queue.
    pub fn new() -> Self {
        Self::default()
    }

    /// Queues a frame. Ignored once closed: whoever sends learns of the end from its own cancellation.
    pub fn send(&self, frame: Vec<u8>) {
        let mut state = self.0.state.lock();
        if state.closed {
            return;
        }
        if state.bytes > 0 && state.bytes + frame.len() > BYTES_MAX {
            self.overflow(&mut state);
            return;
        }
        state.bytes += frame.len();
        state.frames.push_back(frame);
        if state.bytes > BYTES_SOFT && state.over_since.is_none() {
            state.over_since = Some(Instant::now());
        }
        drop(state);
        self.0.readable.notify_one();
    }

    /// Queues a last frame; what is sent later is ignored.
    pub fn close_with(&self, frame: Vec<u8>) {
        let mut state = self.0.state.lock();
        if !state.closed {
            state.bytes += frame.len();
            state.frames.push_back(frame);
        }
        drop(state);
        self.close();
    }

    /// Ends the queue; what is in it is still written.
    pub fn close(&self) {
        self.0.state.lock().closed = true;
        self.0.readable.notify_one();
        self.0.gone.notify_one();
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
                if let Some(mut chunk) = state.frames.pop_front() {
                    while let Some(next) = state.frames.front()
                        && chunk.len() + next.len() <= CHUNK_BYTES
                    {
                        chunk.extend_from_slice(next);
                        state.frames.pop_front();
                    }
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
        if state.bytes <= BYTES_SOFT {
            state.over_since = None;
        }
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
            state.bytes = 0;
        }
        self.close();
    }

    /// What waits is thrown away: it will not be read.
    fn overflow(&self, state: &mut State) {
        state.overflowed = true;
        state.closed = true;
        state.frames.clear();
        self.0.readable.notify_one();
        self.0.gone.notify_one();
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
}
