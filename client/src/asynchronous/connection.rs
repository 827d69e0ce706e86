//! One connection whose requests are tasks: streams, replies and items.

use std::collections::HashMap;
use std::future::poll_fn;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};
use std::time::Duration;

use interprocess::os::unix::uds_local_socket::tokio::Stream;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::drive::drive;
use crate::connection::{STREAMS_USED_UP, lock, milliseconds, streams_used_up};
use crate::dial::dial;
use crate::error::{ClientError, ProtocolError};
use crate::generation::{GRACE, Grants};
use crate::inbox::Inbox;
use crate::options::Options;
use crate::transport::Frame;
use crate::wire::{
    Call, Cancel, Credit, FEATURE_CHECKSUM, Flags, GenerateEnd, GenerateItem, GenerateRequest, Message, Op,
    ServerHello, WireError, decode, encode_frame,
};

/// A connection to the daemon. Clones share it. It closes when the last clone and the last open request are dropped.
#[derive(Clone, Debug)]
pub struct Connection {
    owners: Arc<Owners>,
}

/// Held by everything that uses the connection; the task that serves the socket ends with its drop.
#[derive(Debug)]
struct Owners {
    shared: Arc<Shared>,
}

impl Drop for Owners {
    fn drop(&mut self) {
        self.shared.state().closing = true;
        self.shared.work.notify_one();
    }
}

/// The part of a connection that its task has too.
#[derive(Debug)]
pub(super) struct Shared {
    pub hello: ServerHello,
    pub flags: Flags,
    reply_timeout: Duration,
    state: Mutex<State>,
    /// Wakes the task that serves the socket.
    pub work: Notify,
}

#[derive(Debug)]
pub(super) struct State {
    pub inbox: Inbox,
    /// The tasks that wait for a frame, by stream.
    wakers: HashMap<u32, Waker>,
    next_stream: u32,
    /// Frames that the task has yet to write: at most one request, and few cancels and credits, of each open stream.
    pub out: Vec<u8>,
    /// The first error that made the connection unusable.
    pub broken: Option<ClientError>,
    /// Nothing uses the connection any more.
    pub closing: bool,
}

impl Connection {
    /// Connects, exchanges hellos and checks the server's uid, on a thread for blocking work. Must be called in a tokio
    /// runtime with I/O and time.
    ///
    /// # Errors
    /// [`ClientError::Unavailable`] after `connect_timeout` at the latest; other errors at once.
    pub async fn connect(options: &Options) -> Result<Self, ClientError> {
        let dialled = options.clone();
        let failed = |reason: String| ClientError::Disconnected { reason };
        let (transport, hello) = tokio::task::spawn_blocking(move || dial(&dialled))
            .await
            .map_err(|error| failed(format!("the thread that connects ended: {error}")))??;
        let socket = Stream::try_from(OwnedFd::from(transport.into_stream()))
            .map_err(|error| failed(format!("the runtime cannot serve its socket: {error}")))?;
        let checksum = hello.features & FEATURE_CHECKSUM != 0;
        let shared = Arc::new(Shared {
            hello,
            flags: if checksum { Flags::CRC } else { Flags::NONE },
            reply_timeout: options.reply_timeout,
            state: Mutex::new(State {
                inbox: Inbox::default(),
                wakers: HashMap::new(),
                next_stream: 1,
                out: Vec::new(),
                broken: None,
                closing: false,
            }),
            work: Notify::new(),
        });
        tokio::spawn(drive(Arc::clone(&shared), socket, options.ping_after, options.ping_timeout));
        Ok(Self { owners: Arc::new(Owners { shared }) })
    }

    /// The daemon's hello.
    pub fn hello(&self) -> &ServerHello {
        &self.shared().hello
    }

    /// False if the connection can send no more requests.
    pub fn is_alive(&self) -> bool {
        self.shared().state().broken.is_none()
    }

    /// True if both are the same connection.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.owners, &other.owners)
    }

    /// Requests that may be opened now. One stream is kept for pings.
    pub fn free_streams(&self) -> usize {
        let open = self.shared().state().inbox.open_count();
        (self.hello().limits.max_streams as usize).saturating_sub(1).saturating_sub(open)
    }

    /// Sends a request and waits for its reply, at most `reply_timeout`. Dropping the future cancels the request.
    ///
    /// # Errors
    /// [`ClientError::Server`] is the daemon's answer; all other errors come from the client or the connection.
    pub async fn call<C: Call>(&self, request: &C) -> Result<C::Reply, ClientError> {
        let ticket = self.open(C::OP, request, None)?;
        let frame = ticket.next_frame(Some(self.shared().reply_timeout)).await?;
        ticket.decode(&frame)
    }

    /// Starts a generation. Dropping it cancels the request.
    ///
    /// # Errors
    /// The sending errors of [`Connection::call`].
    pub fn generate(&self, request: &GenerateRequest) -> Result<Generation, ClientError> {
        let credit = self.hello().limits.initial_credit;
        let ticket = self.open(Op::Generate, request, Some(credit))?;
        let timeout = Duration::from_millis(request.timeout_ms.into());
        let deadline = (request.timeout_ms > 0).then(|| Instant::now() + timeout + GRACE);
        let grants = Grants::new(credit);
        Ok(Items { ticket, deadline, grants, end: None, failed: false, items: PhantomData })
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.owners.shared
    }

    fn open<T: Message>(&self, op: Op, request: &T, credit: Option<u32>) -> Result<Ticket, ClientError> {
        let shared = self.shared();
        let max = shared.hello.limits.max_streams;
        let mut state = shared.state();
        if let Some(error) = &state.broken {
            return Err(error.clone());
        }
        if state.inbox.open_count() >= max as usize {
            return Err(ClientError::TooManyStreams { max });
        }
        let stream = shared.append(&mut state, op, request, credit)?;
        Ok(Ticket { connection: self.clone(), stream })
    }
}

impl Shared {
    pub fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Opens a stream with its request, which the task then writes. Returns the stream.
    pub fn append<T: Message>(
        &self,
        state: &mut State,
        op: Op,
        request: &T,
        credit: Option<u32>,
    ) -> Result<u32, ClientError> {
        let stream = state.next_stream;
        if stream == STREAMS_USED_UP {
            return Err(self.break_with(state, streams_used_up()));
        }
        let frame = encode_frame(stream, op, self.flags, self.hello.limits.max_frame, request)?;
        state.out.extend_from_slice(&frame);
        state.inbox.open(stream, credit);
        state.next_stream = stream.checked_add(2).unwrap_or(STREAMS_USED_UP);
        self.work.notify_one();
        Ok(stream)
    }

    /// Sends a message on an open stream.
    fn say<T: Message>(&self, state: &mut State, stream: u32, op: Op, message: &T) {
        // A cancel and a credit have no field that breaks a limit.
        if let Ok(frame) = encode_frame(stream, op, self.flags, self.hello.limits.max_frame, message) {
            state.out.extend_from_slice(&frame);
            self.work.notify_one();
        }
    }

    /// Records the first reason why the connection is unusable, wakes all tasks, and returns it.
    pub fn break_with(&self, state: &mut State, error: ClientError) -> ClientError {
        let error = state.broken.get_or_insert(error).clone();
        state.wakers.drain().for_each(|(_, waker)| waker.wake());
        self.work.notify_one();
        error
    }

    /// Files frames of the server, and wakes the tasks that wait for them.
    pub fn file(
        &self,
        frames: impl Iterator<Item = Result<Frame, ProtocolError>>,
    ) -> Result<(), ClientError> {
        let mut state = self.state();
        for frame in frames {
            let frame = frame?;
            let stream = frame.header.stream;
            state.inbox.accept(frame)?;
            if let Some(waker) = state.wakers.remove(&stream) {
                waker.wake();
            }
        }
        Ok(())
    }
}

/// The right to a stream's frames. Dropping it before the stream's end cancels the request.
#[derive(Debug)]
struct Ticket {
    connection: Connection,
    stream: u32,
}

impl Ticket {
    /// The next frame, in `within` at most; an `Error` frame is returned as [`ClientError::Server`].
    async fn next_frame(&self, within: Option<Duration>) -> Result<Frame, ClientError> {
        self.next_frame_until(within.map(|time| Instant::now() + time)).await
    }

    async fn next_frame_until(&self, deadline: Option<Instant>) -> Result<Frame, ClientError> {
        let start = Instant::now();
        let frame = match deadline {
            None => self.frame().await?,
            Some(deadline) => timeout_at(deadline, self.frame())
                .await
                .map_err(|_| ClientError::Timeout { waited_ms: milliseconds(start.elapsed()) })??,
        };
        if frame.header.known_op() == Some(Op::Error) {
            return Err(ClientError::Server(self.decode::<WireError>(&frame)?));
        }
        Ok(frame)
    }

    /// Frames that came before the connection broke are taken first.
    async fn frame(&self) -> Result<Frame, ClientError> {
        poll_fn(|context| {
            let mut state = self.connection.shared().state();
            if let Some(frame) = state.inbox.take(self.stream) {
                return Poll::Ready(Ok(frame));
            }
            if let Some(error) = &state.broken {
                return Poll::Ready(Err(error.clone()));
            }
            state.wakers.insert(self.stream, context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// A frame's message. A payload that does not match its op breaks the connection.
    fn decode<T: Message>(&self, frame: &Frame) -> Result<T, ClientError> {
        decode(&frame.payload).map_err(|error| {
            let shared = self.connection.shared();
            shared.break_with(&mut shared.state(), ProtocolError::Payload(error).into())
        })
    }

    /// Lets the server send more items.
    fn grant(&self, items: u32) {
        let shared = self.connection.shared();
        let mut state = shared.state();
        if state.inbox.is_open(self.stream) && state.broken.is_none() {
            state.inbox.grant(self.stream, items);
            shared.say(&mut state, self.stream, Op::Credit, &Credit { items, ext: vec![] });
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let shared = self.connection.shared();
        let mut state = shared.state();
        state.wakers.remove(&self.stream);
        if state.inbox.abandon(self.stream) && state.broken.is_none() {
            shared.say(&mut state, self.stream, Op::Cancel, &Cancel::default());
        }
    }
}

/// A running answer.
pub type Generation = Items<GenerateItem, GenerateEnd>;

/// An answer in progress: its items, then [`Items::end`]. Dropping it cancels the request.
#[derive(Debug)]
pub struct Items<I, E> {
    ticket: Ticket,
    deadline: Option<Instant>,
    grants: Grants,
    end: Option<E>,
    failed: bool,
    items: PhantomData<fn() -> I>,
}

impl<I: Message, E: Message> Items<I, E> {
    /// The connection it runs on.
    pub fn connection(&self) -> &Connection {
        &self.ticket.connection
    }

    /// How the answer ended; `None` until all items were taken.
    pub fn end(&self) -> Option<&E> {
        self.end.as_ref()
    }

    /// The next item; `None` once the answer has ended. Grants credit as items are taken: while nobody takes any, the
    /// server waits. No item is lost if the future is dropped.
    ///
    /// # Errors
    /// As [`Connection::call`]; after an error there are no more items.
    pub async fn next_item(&mut self) -> Result<Option<I>, ClientError> {
        if self.end.is_some() || self.failed {
            return Ok(None);
        }
        let outcome = self.take().await;
        self.failed = outcome.is_err();
        outcome
    }

    async fn take(&mut self) -> Result<Option<I>, ClientError> {
        let frame = self.ticket.next_frame_until(self.deadline).await?;
        if frame.header.known_op() == Some(Op::End) {
            self.end = Some(self.ticket.decode(&frame)?);
            return Ok(None);
        }
        let item = self.ticket.decode(&frame)?;
        if let Some(items) = self.grants.took_one() {
            self.ticket.grant(items);
        }
        Ok(Some(item))
    }
}
