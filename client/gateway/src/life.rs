//! The life of one connection: when it waits, when a request is under way, and when it must end.
//!
//! A connection's task alone changes its state, but for one change: its place may be given to a newcomer while it waits.

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::access::{Access, Identity, Peer};
use crate::failure::Failure;
use crate::places::{Full, Places, Rest, Turn};

/// Seconds after which a client may try again whose peer has too many requests under way.
const RETRY_AFTER_S: u32 = 1;

/// How long a connection waits.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// For the head of a request: from its first byte, or from the connection's start.
    pub head: Duration,
    /// For the first byte of a further request.
    pub idle: Duration,
}

/// The place and the state of a connection. Its place is free again once this drops.
#[derive(Debug)]
pub struct Life {
    places: Arc<Places>,
    times: Times,
    state: Mutex<State>,
    /// Told when a newcomer has the place.
    closed: Arc<Notify>,
}

#[derive(Debug)]
struct State {
    peer: Peer,
    phase: Phase,
    /// A request came before, and no byte of the next one.
    rests: bool,
    /// The end of its patience.
    until: Option<Instant>,
    /// The peer for which the request under way counts.
    asks: Option<Peer>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Its task has not read yet.
    New,
    /// No request is complete. It has this turn among those that wait.
    Waits(Turn),
    /// A request is complete, and its answer is not.
    Runs,
    /// An answer is complete, and not yet written.
    Answered,
    /// A newcomer has its place.
    Closed,
}

impl Phase {
    fn is_whole(self) -> bool {
        matches!(self, Phase::Runs | Phase::Answered)
    }
}

/// A request under way, until its answer is complete.
#[derive(Debug)]
pub struct Request(Arc<Life>);

impl Drop for Request {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if state.phase == Phase::Runs {
            state.phase = Phase::Answered;
        }
    }
}

impl Request {
    /// Counts the request for its caller, now that it is known.
    ///
    /// # Errors
    /// Status 429 for a caller that has its share of requests under way.
    pub fn of(&self, access: &Access, caller: Identity) -> Result<(), Failure> {
        let Some(peer) = access.peer(caller) else { return Ok(()) };
        let mut state = self.0.state();
        state.peer = peer;
        if state.asks.is_none() {
            self.0.places.ask(peer, access.tells_callers_apart()).map_err(|full| too_many(peer, full))?;
            state.asks = Some(peer);
        }
        Ok(())
    }

    /// Reads the request's body. While bytes are missing the connection waits, and a newcomer may get its place; `None` if one has.
    pub async fn body<T>(&self, read: impl Future<Output = T>) -> Option<T> {
        let mut read = pin!(read);
        // Most bodies come with their head.
        let first = std::future::poll_fn(|context| Poll::Ready(read.as_mut().poll(context))).await;
        if let Poll::Ready(whole) = first {
            return Some(whole);
        }
        self.0.wait(&mut self.0.state(), Rest::Body);
        let whole = read.await;
        let mut state = self.0.state();
        self.0.go_on(&mut state);
        if state.phase == Phase::Closed {
            return None;
        }
        self.0.enter(&mut state, Phase::Runs);
        Some(whole)
    }
}

fn too_many(peer: Peer, Full { own, total }: Full) -> Failure {
    let message = format!(
        "{peer} has {own} requests under way, which is its share of the gateway's {total} places (--connections): try again"
    );
    Failure { retry_after_s: Some(RETRY_AFTER_S), ..Failure::new(429, message) }
}

impl Life {
    /// Takes a place for a connection of that peer, as [`Places::take`] does.
    pub fn new(places: &Arc<Places>, peer: Peer, times: Times) -> Arc<Self> {
        places.take();
        let until = Some(Instant::now() + times.head);
        let state = State { peer, phase: Phase::New, rests: false, until, asks: None };
        Arc::new(Self {
            places: Arc::clone(places),
            times,
            state: Mutex::new(state),
            closed: Arc::new(Notify::new()),
        })
    }

    /// A request's head is complete. `None` if a newcomer has the connection's place.
    pub fn request(self: &Arc<Self>) -> Option<Request> {
        let mut state = self.state();
        self.go_on(&mut state);
        if state.phase == Phase::Closed {
            return None;
        }
        // Of requests that came together, the next may begin before the last answer is written.
        self.uncount(&mut state);
        self.enter(&mut state, Phase::Runs);
        state.until = None;
        state.rests = false;
        Some(Request(Arc::clone(self)))
    }

    /// Runs the connection until either side ends it, its time is over, or a newcomer has its place.
    pub async fn run(&self, served: Pin<&mut impl Future>) {
        let mut served = served;
        let mut timer = pin!(tokio::time::sleep(Duration::ZERO));
        let mut closed = pin!(self.closed.notified());
        std::future::poll_fn(|context| {
            if served.as_mut().poll(context).is_ready() || closed.as_mut().poll(context).is_ready() {
                return Poll::Ready(());
            }
            let Some(until) = self.state().until else { return Poll::Pending };
            if timer.deadline() != until {
                timer.as_mut().reset(until);
            }
            timer.as_mut().poll(context).map(|()| self.is_late())
        })
        .await;
    }

    fn is_late(&self) {
        let state = self.state();
        if !state.rests {
            self.places.late(state.peer);
        }
    }

    /// Bytes of the client were read, if any, or `none` are there.
    fn read(&self, bytes: bool, none: bool) {
        let mut state = self.state();
        match state.phase {
            Phase::New | Phase::Waits(_) if bytes && (state.rests || state.phase == Phase::New) => {
                // It has waited for nothing so far: now it waits for the rest of the head.
                self.go_on(&mut state);
                state.rests = false;
                state.until = Some(Instant::now() + self.times.head);
            }
            Phase::New if none => self.wait(&mut state, Rest::Head),
            _ => {}
        }
    }

    /// All bytes for the client were handed to the system.
    fn written(&self) {
        let mut state = self.state();
        if state.phase == Phase::Answered {
            self.uncount(&mut state);
            state.rests = true;
            state.until = Some(Instant::now() + self.times.idle);
            self.wait(&mut state, Rest::Head);
        }
    }

    fn wait(&self, state: &mut State, rest: Rest) {
        let turn = self.places.wait(state.peer, rest, &self.closed);
        self.enter(state, Phase::Waits(turn));
    }

    fn enter(&self, state: &mut State, phase: Phase) {
        let before = std::mem::replace(&mut state.phase, phase).is_whole();
        if before != phase.is_whole() {
            self.places.is_whole(!before);
        }
    }

    /// Ends waiting.
    fn go_on(&self, state: &mut State) {
        if let Phase::Waits(turn) = state.phase {
            let goes_on = self.places.go_on(state.peer, turn);
            state.phase = if goes_on { Phase::New } else { Phase::Closed };
        }
    }

    fn uncount(&self, state: &mut State) {
        if let Some(peer) = state.asks.take() {
            self.places.answered(peer);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        let mut state = self.state();
        self.go_on(&mut state);
        self.uncount(&mut state);
        if state.phase != Phase::Closed {
            self.enter(&mut state, Phase::Closed);
            self.places.free();
        }
    }
}

/// A connection's bytes, and its life, which hears of them.
#[derive(Debug)]
pub struct Watched<S> {
    socket: S,
    life: Arc<Life>,
}

impl<S> Watched<S> {
    /// The socket with its life.
    pub fn new(socket: S, life: Arc<Life>) -> Self {
        Self { socket, life }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let outcome = Pin::new(&mut self.socket).poll_read(cx, buf);
        self.life.read(buf.filled().len() > before, outcome.is_pending());
        outcome
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The HTTP library flushes only once its own buffer is written.
        let outcome = Pin::new(&mut self.socket).poll_flush(cx);
        if matches!(outcome, Poll::Ready(Ok(()))) {
            self.life.written();
        }
        outcome
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}
