//! One connection: many requests in flight at once, answers in any order.
//!
//! A thread that waits for a frame reads for all threads if no other thread is reading: it files each frame and wakes
//! the others. So a connection needs no thread of its own, and any number of threads may share one. Lock order:
//! `next_stream` (held while a frame is written), then `state`.

use std::io;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::dial::dial;
use crate::error::{ClientError, ProtocolError};
use crate::generation::{DeviceLoading, Events, Generation};
use crate::inbox::Inbox;
use crate::options::Options;
use crate::transport::{Frame, FrameReader, ReadError, Transport};
use crate::watch::{Due, Watch};
use crate::wire::{
    Call, Cancel, Credit, FEATURE_CHECKSUM, FailRequest, Flags, GenerateRequest, LoadToDeviceRequest,
    Message, Op, PingRequest, ServerHello, SubscribeRequest, WireError, decode,
    encode_frame_with_descriptors,
};

/// Value of `next_stream` when the connection has used all its stream ids.
pub(crate) const STREAMS_USED_UP: u32 = 0;

/// A connection to the daemon. Clones share it. It closes when the last clone and the last open request are dropped.
#[derive(Clone, Debug)]
pub struct Connection {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    transport: Transport,
    hello: ServerHello,
    flags: Flags,
    reply_timeout: Duration,
    ping_timeout: Duration,
    /// Id of the next request. The lock is held while a request is written, so ids rise on the wire.
    next_stream: Mutex<u32>,
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Debug)]
struct State {
    inbox: Inbox,
    /// `None` while a thread reads.
    reader: Option<FrameReader>,
    watch: Watch,
    /// Stream of the last ping that the watch asked for.
    ping_stream: u32,
    /// The first error that made the connection unusable.
    broken: Option<ClientError>,
}

impl Connection {
    /// Connects, exchanges hellos and checks the server's uid.
    ///
    /// # Errors
    /// [`ClientError::Unavailable`] after `connect_timeout` at the latest; other errors at once.
    pub fn connect(options: &Options) -> Result<Self, ClientError> {
        let (transport, hello) = dial(options)?;
        let state = State {
            inbox: Inbox::default(),
            reader: Some(FrameReader::new(hello.limits.max_frame)),
            watch: Watch::new(options.ping_after, options.ping_timeout),
            ping_stream: 0,
            broken: None,
        };
        let checksum = hello.features & FEATURE_CHECKSUM != 0;
        Ok(Self {
            shared: Arc::new(Shared {
                transport,
                hello,
                flags: if checksum { Flags::CRC } else { Flags::NONE },
                reply_timeout: options.reply_timeout,
                ping_timeout: options.ping_timeout,
                next_stream: Mutex::new(1),
                state: Mutex::new(state),
                arrived: Condvar::new(),
            }),
        })
    }

    /// The daemon's hello.
    pub fn hello(&self) -> &ServerHello {
        &self.shared.hello
    }

    /// False if the connection can send no more requests, also if the daemon closed it while no thread was reading.
    pub fn is_alive(&self) -> bool {
        self.shared.state().broken.is_none() && !self.shared.transport.is_hung_up()
    }

    /// True if both are the same connection.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// [`ClientError::Server`] is the daemon's answer; all other errors come from the client or the connection.
    pub fn call<C: Call>(&self, request: &C) -> Result<C::Reply, ClientError> {
        self.send(request)?.wait()
    }

    /// Sends a request. The returned value waits for its reply; replies may be taken in any order.
    ///
    /// # Errors
    /// The sending errors of [`Connection::call`].
    pub fn send<C: Call>(&self, request: &C) -> Result<Pending<C::Reply>, ClientError> {
        self.send_with_descriptors(request, &[])
    }

    /// As [`Connection::send`], with file descriptors.
    ///
    /// # Errors
    /// As [`Connection::send`].
    pub fn send_with_descriptors<C: Call>(
        &self,
        request: &C,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Pending<C::Reply>, ClientError> {
        let stream = self.open(C::OP, request, fds, None)?;
        Ok(Pending { ticket: Ticket { connection: self.clone(), stream }, reply: PhantomData })
    }

    /// Starts a generation.
    ///
    /// # Errors
    /// As [`Connection::send`].
    pub fn generate(&self, request: &GenerateRequest) -> Result<Generation, ClientError> {
        let stream = self.open(Op::Generate, request, &[], Some(self.shared.hello.limits.initial_credit))?;
        Ok(Generation::new(Ticket { connection: self.clone(), stream }, request.timeout_ms))
    }

    /// Starts a load of a model's weights to the device.
    ///
    /// # Errors
    /// As [`Connection::send`].
    pub fn load_to_device(&self, request: &LoadToDeviceRequest) -> Result<DeviceLoading, ClientError> {
        let credit = Some(self.shared.hello.limits.initial_credit);
        let stream = self.open(Op::LoadToDevice, request, &[], credit)?;
        Ok(DeviceLoading::new(Ticket { connection: self.clone(), stream }, 0))
    }

    /// Subscribes to events of weights and models.
    ///
    /// # Errors
    /// As [`Connection::send`].
    pub fn subscribe(&self, request: &SubscribeRequest) -> Result<Events, ClientError> {
        let stream = self.open(Op::Subscribe, request, &[], Some(self.shared.hello.limits.initial_credit))?;
        Ok(Events::new(Ticket { connection: self.clone(), stream }, 0))
    }

    /// Requests an error; the daemon answers nothing else.
    pub fn fail(&self, request: &FailRequest) -> ClientError {
        let outcome = self.open(Op::Fail, request, &[], None).and_then(|stream| {
            let ticket = Ticket { connection: self.clone(), stream };
            ticket.next_frame(Some(Instant::now() + self.shared.reply_timeout))
        });
        match outcome {
            Ok(frame) => self.shared.unexpected(
                &frame,
                ProtocolError::UnexpectedOp { stream: frame.header.stream, op: frame.header.op },
            ),
            Err(error) => error,
        }
    }

    /// Cancels a request, from any thread. Its owner gets `Cancelled`, or the answer if that came first.
    ///
    /// # Errors
    /// [`ClientError::Disconnected`] and similar; a stream that has ended is no error.
    pub fn cancel(&self, stream: u32) -> Result<(), ClientError> {
        let guard = lock(&self.shared.next_stream);
        if !self.shared.state().inbox.is_open(stream) {
            return Ok(());
        }
        self.shared.write(&guard, stream, Op::Cancel, &Cancel::default(), &[])
    }

    /// Ends the connection, because the daemon broke the protocol.
    pub(crate) fn end_with(&self, error: ProtocolError) -> ClientError {
        self.shared.break_with(error.into())
    }

    /// Lets the server send more items on a stream.
    pub(crate) fn grant(&self, stream: u32, items: u32) -> Result<(), ClientError> {
        let guard = lock(&self.shared.next_stream);
        {
            let mut state = self.shared.state();
            if !state.inbox.is_open(stream) {
                return Ok(());
            }
            state.inbox.grant(stream, items);
        }
        match self.shared.write(&guard, stream, Op::Credit, &Credit { items, ext: vec![] }, &[]) {
            // The server's last frames may still be unread: later reads return them, and then the end of the
            // connection.
            Err(ClientError::Disconnected { .. }) => Ok(()),
            outcome => outcome,
        }
    }

    fn open<T: Message>(
        &self,
        op: Op,
        request: &T,
        fds: &[BorrowedFd<'_>],
        credit: Option<u32>,
    ) -> Result<u32, ClientError> {
        let mut next_stream = lock(&self.shared.next_stream);
        let stream = *next_stream;
        if stream == STREAMS_USED_UP {
            return Err(self.shared.break_with(streams_used_up()));
        }
        let max = self.shared.hello.limits.max_streams;
        {
            let mut state = self.shared.state();
            if let Some(error) = &state.broken {
                return Err(error.clone());
            }
            if state.inbox.open_count() >= max as usize {
                return Err(ClientError::TooManyStreams { max });
            }
            state.inbox.open(stream, credit);
        }
        if let Err(error) = self.shared.write(&next_stream, stream, op, request, fds) {
            self.shared.state().inbox.forget(stream);
            return Err(error);
        }
        *next_stream = stream.checked_add(2).unwrap_or(STREAMS_USED_UP);
        Ok(stream)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Writes a frame; the guard keeps frames whole. A frame cut short by a failure breaks the connection. If the
    /// server has hung up, only writing fails: frames that it sent before can still be read.
    fn write<T: Message>(
        &self,
        whole: &MutexGuard<'_, u32>,
        stream: u32,
        op: Op,
        message: &T,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let deadline = Instant::now().checked_add(self.reply_timeout);
        self.write_until(whole, stream, op, message, fds, deadline)
    }

    fn write_until<T: Message>(
        &self,
        _whole: &MutexGuard<'_, u32>,
        stream: u32,
        op: Op,
        message: &T,
        fds: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<(), ClientError> {
        let n_fds = u8::try_from(fds.len()).unwrap_or(u8::MAX);
        let frame = encode_frame_with_descriptors(
            stream,
            op,
            self.flags,
            self.hello.limits.max_frame,
            n_fds,
            message,
        )?;
        self.transport.write_all(&frame, fds, deadline).map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => disconnected(&error),
            _ => self.break_with(disconnected(&error)),
        })
    }

    /// The next frame of a stream.
    fn next_frame(&self, stream: u32, deadline: Option<Instant>) -> Result<Frame, ClientError> {
        let start = Instant::now();
        self.state().watch.begin(start);
        let outcome = self.wait_for_frame(stream, deadline);
        self.state().watch.end();
        outcome?.ok_or_else(|| ClientError::Timeout { waited_ms: milliseconds(start.elapsed()) })
    }

    /// The next frame of a stream; `None` after the deadline. Reads for all streams if no other thread is reading.
    fn wait_for_frame(&self, stream: u32, deadline: Option<Instant>) -> Result<Option<Frame>, ClientError> {
        let mut state = self.state();
        loop {
            if let Some(frame) = state.inbox.take(stream) {
                return Ok(Some(frame));
            }
            if let Some(error) = &state.broken {
                return Err(error.clone());
            }
            if let Some(reader) = state.reader.take() {
                let in_time;
                (state, in_time) = self.read_for_all(state, reader, deadline);
                let is_late = !in_time && deadline.is_some_and(|deadline| deadline <= Instant::now());
                if is_late && state.broken.is_none() && !state.inbox.has(stream) {
                    return Ok(None);
                }
                continue;
            }
            state = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                None => self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return Ok(None),
                Some(left) => {
                    self.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Reads one frame, files it, and wakes the other threads. It ends without one, and returns false, at the deadline
    /// or at the watch's next check; a silent daemon is then pinged or given up.
    fn read_for_all<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        mut reader: FrameReader,
        deadline: Option<Instant>,
    ) -> (MutexGuard<'a, State>, bool) {
        let until = [deadline, state.watch.next_check()].into_iter().flatten().min();
        drop(state);
        let outcome = reader.read(&self.transport, until);
        let mut state = self.state();
        state.reader = Some(reader);
        let now = Instant::now();
        let (mut in_time, mut due) = (true, Due::Nothing);
        let filed = match outcome {
            Ok(frame) => {
                state.watch.heard(now);
                state.inbox.accept(frame)
            }
            Err(ReadError::Protocol(error)) => Err(error.into()),
            Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::TimedOut => {
                (in_time, due) = (false, state.watch.due(now));
                match due {
                    Due::GiveUp(silence) => Err(ClientError::Silent { waited_ms: milliseconds(silence) }),
                    Due::Nothing | Due::Ping => Ok(()),
                }
            }
            Err(ReadError::Io(error)) => Err(disconnected(&error)),
        };
        if let Err(error) = filed {
            state.broken.get_or_insert(error);
        }
        self.arrived.notify_all();
        if due == Due::Ping {
            drop(state);
            self.ping();
            state = self.state();
        }
        (state, in_time)
    }

    /// Asks the daemon for a sign of life. The answer is dropped: that it comes is enough.
    fn ping(&self) {
        let mut next_stream = lock(&self.next_stream);
        let stream = *next_stream;
        {
            let mut state = self.state();
            let ping_stream = state.ping_stream;
            if state.inbox.is_open(ping_stream) {
                return; // one that is still unanswered asks the same
            }
            let full = state.inbox.open_count() >= self.hello.limits.max_streams as usize;
            if full || stream == STREAMS_USED_UP {
                // One stream more would break the protocol. Without a ping, silence proves nothing.
                state.watch.heard(Instant::now());
                return;
            }
            state.inbox.open(stream, None);
            state.inbox.abandon(stream);
            state.ping_stream = stream;
        }
        *next_stream = stream.checked_add(2).unwrap_or(STREAMS_USED_UP);
        let deadline = Instant::now().checked_add(self.ping_timeout);
        // If this fails, the connection is broken or at its end, and the next read finds out.
        let _ = self.write_until(&next_stream, stream, Op::Ping, &PingRequest::default(), &[], deadline);
    }

    /// Records the first reason why the connection is unusable, and returns it.
    fn break_with(&self, error: ClientError) -> ClientError {
        let error = self.state().broken.get_or_insert(error).clone();
        self.arrived.notify_all();
        error
    }

    /// An unexpected answer breaks the connection; an `Error` frame is returned as it is.
    fn unexpected(&self, frame: &Frame, otherwise: ProtocolError) -> ClientError {
        if frame.header.known_op() != Some(Op::Error) {
            return self.break_with(otherwise.into());
        }
        match decode::<WireError>(&frame.payload) {
            Ok(error) => ClientError::Server(error),
            Err(error) => self.break_with(ProtocolError::Payload(error).into()),
        }
    }
}

/// The right to a stream's frames. Dropping it before the stream's end cancels the request.
#[derive(Debug)]
pub(crate) struct Ticket {
    connection: Connection,
    stream: u32,
}

impl Ticket {
    pub fn stream(&self) -> u32 {
        self.stream
    }

    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// The next frame; an `Error` frame is returned as [`ClientError::Server`].
    pub fn next_frame(&self, deadline: Option<Instant>) -> Result<Frame, ClientError> {
        let shared = &self.connection.shared;
        let frame = shared.next_frame(self.stream, deadline)?;
        if frame.header.known_op() == Some(Op::Error) {
            let op = frame.header.op;
            return Err(shared.unexpected(&frame, ProtocolError::UnexpectedOp { stream: self.stream, op }));
        }
        Ok(frame)
    }

    /// A frame's message. A payload that does not match its op breaks the connection.
    pub fn decode<T: Message>(&self, frame: &Frame) -> Result<T, ClientError> {
        decode(&frame.payload)
            .map_err(|error| self.connection.shared.break_with(ProtocolError::Payload(error).into()))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let shared = &self.connection.shared;
        let guard = lock(&shared.next_stream);
        let (unfinished, broken) = {
            let mut state = shared.state();
            (state.inbox.abandon(self.stream), state.broken.is_some())
        };
        if unfinished && !broken {
            // If this fails, the connection is broken, and every later use of it reports that.
            let _ = shared.write(&guard, self.stream, Op::Cancel, &Cancel::default(), &[]);
        }
    }
}

/// A reply in flight. Dropping it cancels the request.
#[derive(Debug)]
pub struct Pending<R> {
    ticket: Ticket,
    reply: PhantomData<fn() -> R>,
}

impl<R: Message> Pending<R> {
    /// The request's stream, for [`Connection::cancel`].
    pub fn stream(&self) -> u32 {
        self.ticket.stream
    }

    /// Waits for the reply, at most `reply_timeout`.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn wait(self) -> Result<R, ClientError> {
        let deadline = Instant::now() + self.ticket.connection.shared.reply_timeout;
        self.wait_until(deadline)
    }

    /// Waits for the reply until `deadline`; after [`ClientError::Timeout`] the request is cancelled.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn wait_until(self, deadline: Instant) -> Result<R, ClientError> {
        let frame = self.ticket.next_frame(Some(deadline))?;
        self.ticket.decode(&frame)
    }
}

pub(crate) fn milliseconds(time: Duration) -> u64 {
    time.as_millis().try_into().unwrap_or(u64::MAX)
}

/// The error of a connection that has used all its stream ids.
pub(crate) fn streams_used_up() -> ClientError {
    ClientError::Disconnected { reason: "all 2^31 stream ids are used: connect again".to_owned() }
}

pub(crate) fn disconnected(error: &io::Error) -> ClientError {
    let reason = match error.kind() {
        io::ErrorKind::UnexpectedEof => "the daemon closed the connection".to_owned(),
        io::ErrorKind::TimedOut => "the daemon stopped reading".to_owned(),
        _ => error.to_string(),
    };
    ClientError::Disconnected { reason }
}

/// Locks, even after another holder panicked: each holder leaves the guarded data consistent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
