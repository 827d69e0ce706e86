//! A session serves one connected client. It turns the client's frames into requests and jobs. It sends the results
//! back as frames.
//!
//! This layer does no I/O: the socket layer delivers [`Frame`]s and takes frames out of the [`Outbox`]. A frame becomes
//! a message (decoded, each field within its limit), then a valid request (checked against the model and the limits).
//! Only a valid request reaches the scheduler. Wire types end here.
//!
//! A stream's life: opened by a request's frame (odd id, higher than all before) -> answered in one frame or several ->
//! ended by `Reply`, `End` or `Error`. `Cancel` and the connection's end cancel the request. Breaking the framing rules
//! is a [`Fatal`] error that ends the connection; any other error ends its stream.

use std::collections::{BTreeMap, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};
use std::time::Instant;

use futures_util::FutureExt;
use rocmforge_client::wire::{
    self, ClientMessage, ErrorCode, Flags, FrameHeader, HelloLimits, Op, ServerHello, WireError,
};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

mod answer;
pub mod budget;
mod coarse;
mod daemon;
mod device_load;
mod doctor;
mod error;
mod events;
mod generate;
mod host;
mod limit;
mod logged;
mod memory;
mod models;
pub mod outbox;
mod pace;
mod policy;
mod prompt;
mod residency;
mod service;
mod subscribe;
mod text;
mod text_time;
mod turns;

use answer::Answer;
use budget::Held;
use error::{Failure, failure, of_codec, of_refusal, of_store, shortage};
pub use error::{share_code, store_code};
pub use events::ModelEvents;
pub use logged::LoggedUids;
pub use outbox::Outbox;
pub use policy::{Credentials, Policy, Right, Who};
pub use service::{BLOCKING_MAX, OutlivesRestart, Service, Settings};

use crate::aside::{ReceivedFd, thread_time};
use crate::lock::{Mutex, Rank};
use crate::model::store::Lease;
use crate::scheduler::SequenceId;
use crate::share::Refusal;

/// A received frame. Its header was checked; payload and descriptors have the lengths that the header announced.
#[derive(Debug)]
pub struct Frame {
    /// Checked header.
    pub header: FrameHeader,
    /// Encoded message.
    pub payload: Vec<u8>,
    /// File descriptors that arrived with the frame.
    pub fds: Vec<ReceivedFd>,
    /// True when the process had no free descriptors for all that arrived; then `fds` is incomplete.
    pub fds_lost: bool,
    /// Why the descriptors were closed: the user's requests hold too many. Then `fds` is empty.
    pub fds_refused: Option<Refusal>,
    /// The request's shares, held until it is answered.
    pub held: Held,
}

/// The client's user and its rights under the policy in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Peer {
    /// Effective user id at connect time.
    uid: u32,
    /// Has every right.
    administrator: bool,
    /// May see other users' models and requests.
    sees: bool,
}

/// The client broke the framing rules; the connection must end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Fatal {
    /// Code to send to the client.
    pub code: ErrorCode,
    /// The broken rule, for the client.
    pub message: String,
}

/// Tells whether a session has work, without keeping it alive.
#[derive(Debug)]
pub struct SessionWatch(Weak<Connection>);

impl SessionWatch {
    /// True while a request of the session is open.
    pub fn has_open_streams(&self) -> bool {
        self.0.upgrade().is_some_and(|connection| !connection.streams.lock().is_empty())
    }
}

/// One client after its hello.
#[derive(Debug)]
pub struct Session {
    connection: Arc<Connection>,
    /// Highest stream id so far.
    last_stream: u32,
}

/// State that all requests of a session share.
#[derive(Debug)]
struct Connection {
    /// Unique while the daemon runs.
    number: u64,
    service: Arc<Service>,
    peer: Credentials,
    outbox: Outbox,
    limits: HelloLimits,
    flags: Flags,
    /// Open streams; at most `limits.max_streams`.
    streams: Mutex<HashMap<u32, Arc<Control>>>,
}

/// Handles to steer a request while it runs.
#[derive(Debug)]
struct Control {
    cancel: CancellationToken,
    credit: Mutex<CreditSink>,
    /// Notified when credit is saved.
    granted: Notify,
}

/// Destination of granted credit.
#[derive(Debug)]
enum CreditSink {
    /// Saved until the sequence is submitted.
    Saved(u32),
    /// Passed on to the engine.
    Sequence(SequenceId),
}

impl Session {
    /// A session with the terms agreed in `hello`; answers go to `outbox`.
    pub fn new(service: Arc<Service>, peer: Credentials, hello: &ServerHello, outbox: Outbox) -> Self {
        let crc = hello.features & wire::FEATURE_CHECKSUM != 0;
        let connection = Connection {
            number: service.new_connection(),
            service,
            peer,
            outbox,
            limits: hello.limits,
            flags: if crc { Flags::CRC } else { Flags::NONE },
            streams: Mutex::new(Rank::Streams, HashMap::new()),
        };
        Self { connection: Arc::new(connection), last_stream: 0 }
    }

    /// A look at the session from outside.
    pub fn watch(&self) -> SessionWatch {
        SessionWatch(Arc::downgrade(&self.connection))
    }

    /// Handles a frame: starts a request, or steers a running one. Never blocks. Returns when the next frame may be read,
    /// if that is not now: its user then has paid for the processor time of this one.
    ///
    /// # Errors
    /// [`Fatal`]: send it on stream 0 (see [`Session::last_words`]), then close the connection.
    pub fn on_frame(&mut self, frame: Frame) -> Result<Option<Instant>, Fatal> {
        let begun = thread_time();
        self.handle(frame)?;
        let took = thread_time().saturating_sub(begun);
        let Connection { service, peer, .. } = &*self.connection;
        let free = service.policy().is_administrator(peer);
        Ok(if free { None } else { service.pace.frame(peer.uid, took) })
    }

    fn handle(&mut self, frame: Frame) -> Result<(), Fatal> {
        let op = frame.header.known_op();
        if frame.header.flags.contains(Flags::MORE) {
            return Err(fatal(ErrorCode::BadFrame, "a client's message must be one frame, but MORE is set"));
        }
        if frame.header.n_fds > 0 && op != Some(Op::Load) {
            let text = format!(
                "op {} takes no file descriptors, but {} arrived",
                frame.header.op, frame.header.n_fds
            );
            return Err(fatal(ErrorCode::BadDescriptors, &text));
        }
        match op {
            Some(Op::Cancel | Op::Credit) => self.steer(&frame),
            _ => self.open_stream(frame),
        }
    }

    /// Handles `Cancel` and `Credit`. Both are ignored if their stream has ended.
    fn steer(&self, frame: &Frame) -> Result<(), Fatal> {
        let stream = frame.header.stream;
        if stream.is_multiple_of(2) || stream > self.last_stream {
            return Err(fatal(ErrorCode::BadStream, &format!("stream {stream} was never opened")));
        }
        let message = ClientMessage::decode(frame.header.op, &frame.payload);
        let message = message.map_err(|error| fatal(ErrorCode::BadFrame, &error.to_string()))?;
        let control = self.connection.streams.lock().get(&stream).cloned();
        let Some(control) = control else { return Ok(()) };
        match message {
            ClientMessage::Cancel(_) => control.cancel.cancel(),
            ClientMessage::Credit(credit) => {
                let engine = &self.connection.service.engine;
                control.credit(credit.items, |id, items| engine.credit(id, items));
            }
            _ => {}
        }
        Ok(())
    }

    fn open_stream(&mut self, frame: Frame) -> Result<(), Fatal> {
        let stream = frame.header.stream;
        if stream.is_multiple_of(2) || stream <= self.last_stream {
            let last = self.last_stream;
            let text = format!(
                "stream {stream} is not valid: ids must be odd and increase, the last one was {last}"
            );
            return Err(fatal(ErrorCode::BadStream, &text));
        }
        self.last_stream = stream;
        let control = Arc::new(Control::new(self.connection.limits.initial_credit));
        {
            let mut streams = self.connection.streams.lock();
            let limit = self.connection.limits.max_streams;
            if streams.len() >= limit as usize {
                let text = format!("{limit} streams are open already: wait for one to end");
                return Err(fatal(ErrorCode::TooManyStreams, &text));
            }
            streams.insert(stream, Arc::clone(&control));
        }
        let answer = Answer::new(Arc::clone(&self.connection), stream);
        self.start(frame, control, answer)
    }

    /// Decodes the request, checks it, and has it answered.
    fn start(&mut self, frame: Frame, control: Arc<Control>, answer: Answer) -> Result<(), Fatal> {
        let message = match ClientMessage::decode(frame.header.op, &frame.payload) {
            Ok(message) => message,
            Err(error) => {
                answer.fail(&of_codec(&error));
                return Ok(());
            }
        };
        if let ClientMessage::Load(load) = &message
            && frame.header.n_fds != u8::from(load.by_descriptor)
        {
            let text = format!(
                "by_descriptor is {}, but {} descriptors arrived",
                load.by_descriptor, frame.header.n_fds
            );
            answer.fail(&failure(ErrorCode::BadDescriptors, &text));
            return Err(fatal(ErrorCode::BadDescriptors, &text));
        }
        if frame.fds_lost {
            answer.fail(&shortage("the kernel could not hand over the model's descriptor"));
            return Ok(());
        }
        if let Some(refusal) = &frame.fds_refused {
            answer.fail(&of_refusal(refusal, "too many descriptors wait in requests", 1, "descriptors"));
            return Ok(());
        }
        if let Some(right) = Right::of(&message)
            && let Err(refusal) = self.connection.service.policy().check(&self.connection.peer, right)
        {
            let (uid, rule) = (self.connection.peer.uid, right.key());
            if let Some(untold) = self.connection.service.may_log(uid) {
                tracing::info!(name: "refused", uid, rule, untold, "a request was refused by the policy");
            }
            answer.fail(&refusal);
            return Ok(());
        }
        let open = match self.connection.service.budget.open(self.connection.peer.uid) {
            Ok(charge) => Some(charge),
            Err(refusal) => {
                answer.fail(&of_refusal(&refusal, "too many requests are open", 1, "open requests"));
                return Ok(());
            }
        };
        let held = Arc::new(Held { open, ..frame.held });
        let call = Call { connection: Arc::clone(&self.connection), control, _held: held };
        call.answer(message, answer, frame.fds, frame.payload);
        Ok(())
    }

    /// The frame that tells the client why its connection ends.
    pub fn last_words(&self, fatal: &Fatal) -> Option<Vec<u8>> {
        let error = WireError::new(fatal.code, &fatal.message);
        let Connection { flags, limits, .. } = &*self.connection;
        wire::encode_frame(0, Op::Error, *flags, limits.max_frame, &error).ok()
    }
}

impl Drop for Session {
    /// Cancels every open request of the connection.
    fn drop(&mut self) {
        for control in self.connection.streams.lock().values() {
            control.cancel.cancel();
        }
    }
}

/// One request in flight: its connection, and the handles that steer it.
#[derive(Clone, Debug)]
struct Call {
    connection: Arc<Connection>,
    control: Arc<Control>,
    /// Given back when no task and no thread works on the request any more.
    _held: Arc<Held>,
}

impl Call {
    /// Answers a request that may run: at once if that takes no time, else in a task of its own.
    fn answer(self, message: ClientMessage, answer: Answer, fds: Vec<ReceivedFd>, payload: Vec<u8>) {
        match message {
            ClientMessage::Ping(request) => answer.reply(&daemon::ping(request)),
            ClientMessage::Fail(request) => answer.fail_as_asked(&daemon::fail(&request)),
            ClientMessage::Info(_) => answer.reply(&daemon::info(&self)),
            ClientMessage::Ps(request) => self.spawn(answer, daemon::ps(self.clone(), request)),
            ClientMessage::CancelRequests(request) => {
                self.spawn(answer, daemon::cancel(self.clone(), request));
            }
            ClientMessage::LimitUser(request) => self.spawn(answer, limit::limit(self.clone(), request)),
            ClientMessage::Status(_) => self.spawn(answer, daemon::status(self.clone())),
            ClientMessage::Doctor(_) => self.spawn(answer, doctor::doctor(self.clone())),
            ClientMessage::List(request) => self.spawn(answer, models::list(self.clone(), request)),
            ClientMessage::Show(request) => self.spawn(answer, models::show(self.clone(), request)),
            ClientMessage::Load(request) => {
                let fd = fds.into_iter().next();
                self.spawn(answer, models::load(self.clone(), request, fd, payload));
            }
            ClientMessage::LoadToDevice(request) => self.spawn_device_load(answer, request),
            ClientMessage::ClearCache(request) => self.spawn(answer, residency::clear(self.clone(), request)),
            ClientMessage::SetRules(request) => {
                self.spawn(answer, residency::set_rules(self.clone(), request))
            }
            ClientMessage::Subscribe(_) => self.spawn_subscribe(answer),
            ClientMessage::Plan(request) => self.spawn(answer, residency::plan(self.clone(), request)),
            ClientMessage::Residency(request) => {
                self.spawn(answer, residency::residency(self.clone(), request));
            }
            ClientMessage::Unload(request) => {
                self.spawn(answer, models::unload(self.clone(), request, payload));
            }
            ClientMessage::Tokenize(request) => self.spawn(answer, text::tokenize(self.clone(), request)),
            ClientMessage::Detokenize(request) => self.spawn(answer, text::detokenize(self.clone(), request)),
            ClientMessage::Generate(request) => self.spawn_generate(answer, request),
            ClientMessage::Cancel(_) | ClientMessage::Credit(_) => {} // handled by `steer`
        }
    }

    fn service(&self) -> &Arc<Service> {
        &self.connection.service
    }

    fn peer(&self) -> Peer {
        let (credentials, policy) = (&self.connection.peer, self.service().policy());
        Peer {
            uid: credentials.uid,
            administrator: policy.is_administrator(credentials),
            sees: policy.allows(credentials, Right::See),
        }
    }

    /// True if the policy allows the client that.
    fn may(&self, right: Right) -> bool {
        self.service().policy().allows(&self.connection.peer, right)
    }

    /// The client's rights as text for display.
    fn rights(&self) -> String {
        self.service().policy().rights(&self.connection.peer)
    }

    /// Runs a request with one reply in a task of its own. Cancelling drops the future; blocking work it started runs
    /// to its end, and its result is discarded.
    fn spawn<T: wire::Message + Send>(
        &self,
        answer: Answer,
        work: impl Future<Output = Result<T, Failure>> + Send + 'static,
    ) {
        let cancel = self.control.cancel.clone();
        let (service, uid) = (Arc::clone(self.service()), self.connection.peer.uid);
        self.service().tasks.spawn(async move {
            let work = AssertUnwindSafe(service.pace.paid(uid, work)).catch_unwind();
            let result = tokio::select! {
                result = work => result.unwrap_or_else(|_| Err(panicked())),
                () = cancel.cancelled() => Err(failure(ErrorCode::Cancelled, "cancelled")),
            };
            answer.in_turn(Op::Reply, result).await;
        });
    }

    fn spawn_generate(self, answer: Answer, request: wire::GenerateRequest) {
        let tasks = self.service().tasks.clone();
        tasks.spawn(async move {
            let work =
                self.service().pace.paid(self.connection.peer.uid, generate::run(&self, &answer, request));
            let work = AssertUnwindSafe(work).catch_unwind();
            let result = work.await.unwrap_or_else(|_| Err(panicked()));
            answer.in_turn(Op::End, result).await;
        });
    }

    fn spawn_device_load(self, answer: Answer, request: wire::LoadToDeviceRequest) {
        let tasks = self.service().tasks.clone();
        tasks.spawn(async move {
            let work = AssertUnwindSafe(device_load::run(&self, &answer, request)).catch_unwind();
            let result = work.await.unwrap_or_else(|_| Err(panicked()));
            answer.in_turn(Op::End, result).await;
        });
    }

    fn spawn_subscribe(self, answer: Answer) {
        let tasks = self.service().tasks.clone();
        tasks.spawn(async move {
            let work = AssertUnwindSafe(subscribe::run(&self, &answer)).catch_unwind();
            let result = work.await.unwrap_or_else(|_| Err(panicked()));
            answer.in_turn(Op::End, result).await;
        });
    }

    /// Call when a request on that model failed: notifies watchers if the model's file is the reason.
    async fn note_poison(&self, lease: Arc<Lease>) {
        let noted = self.blocking(move |call| {
            call.service().events.note_poison(lease.model());
            Ok(())
        });
        let _ = noted.await; // the request reports its own failure
    }

    /// The model of that name, mapped if necessary; true when this call mapped it. Blocks.
    fn acquire(&self, name: &str) -> Result<(Lease, bool), Failure> {
        let acquired = self.service().store.acquire(self.peer().uid, name);
        let (lease, mapped_now) = acquired.map_err(|error| of_store(&error))?;
        if mapped_now {
            self.service().events.mapped(lease.model().id);
        }
        Ok((lease, mapped_now))
    }

    /// Numbers of the user's own requests by model; `None` if it may see those of all users.
    fn own_sequences(&self) -> Option<BTreeMap<String, u32>> {
        (!self.peer().sees).then(|| self.service().sequences_of(self.peer().uid))
    }

    /// Runs blocking work off the runtime's threads, once it is this uid's turn. Work that has begun runs to its end
    /// and keeps its turn, even if no caller waits for it any more.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Call) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let call = self.clone();
        let turn = self.service().blocking.take(self.peer().uid).await;
        let work = move || {
            let result = work(&call);
            drop(turn);
            result
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(result) => result,
            Err(_) => Err(panicked()),
        }
    }
}

impl Control {
    fn new(credit: u32) -> Self {
        Self {
            cancel: CancellationToken::new(),
            credit: Mutex::new(Rank::Credit, CreditSink::Saved(credit)),
            granted: Notify::new(),
        }
    }

    /// Saves granted credit, or passes it on to the request's sequence.
    fn credit(&self, items: u32, pass_on: impl FnOnce(SequenceId, u32)) {
        match &mut *self.credit.lock() {
            CreditSink::Saved(saved) => {
                *saved = saved.saturating_add(items);
                self.granted.notify_one();
            }
            CreditSink::Sequence(id) => pass_on(*id, items),
        }
    }

    /// Takes one item of credit if there is any: for requests without a sequence.
    fn take_credit(&self) -> bool {
        match &mut *self.credit.lock() {
            CreditSink::Saved(saved @ 1..) => {
                *saved -= 1;
                true
            }
            _ => false,
        }
    }

    /// Waits for one item of credit and takes it.
    async fn wait_credit(&self) {
        while !self.take_credit() {
            self.granted.notified().await;
        }
    }

    /// Submits the request's sequence with the saved credit. Credit granted meanwhile waits on the lock until the
    /// sequence is known: the engine ignores credit for an unknown sequence.
    fn submit<E>(&self, id: SequenceId, submit: impl FnOnce(u32) -> Result<(), E>) -> Result<(), E> {
        let mut sink = self.credit.lock();
        let saved = match &*sink {
            CreditSink::Saved(items) => *items,
            CreditSink::Sequence(_) => 0, // a stream is one request: this was not set before
        };
        submit(saved)?;
        *sink = CreditSink::Sequence(id);
        Ok(())
    }
}

fn fatal(code: ErrorCode, message: &str) -> Fatal {
    Fatal { code, message: message.to_owned() }
}

/// The failure sent for a request that panicked: a bug of the daemon. The log has the panic's text.
fn panicked() -> Failure {
    failure(ErrorCode::Internal, "a bug in the daemon ended this request; see the daemon's log")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn credit_granted_while_a_sequence_is_submitted_is_not_lost() {
        let control = Control::new(3);
        control.credit(4, |_, _| unreachable!("nothing was submitted"));
        let id = SequenceId(9);
        let live = AtomicBool::new(false);
        let passed_on = AtomicU32::new(0);
        let (granting, granted) = channel();
        std::thread::scope(|scope| {
            let submitted: Result<(), ()> = control.submit(id, |saved| {
                assert_eq!(saved, 7);
                scope.spawn(|| {
                    granting.send(()).unwrap();
                    control.credit(5, |to, items| {
                        assert!(live.load(Ordering::SeqCst), "the engine would ignore it");
                        assert_eq!(to, id);
                        passed_on.fetch_add(items, Ordering::SeqCst);
                    });
                });
                granted.recv().unwrap();
                std::thread::sleep(Duration::from_millis(50)); // time for a wrong call to happen
                live.store(true, Ordering::SeqCst);
                Ok(())
            });
            assert_eq!(submitted, Ok(()));
        });
        assert_eq!(passed_on.into_inner(), 5);
    }

    #[test]
    fn credit_of_a_request_that_was_refused_stays_here() {
        let control = Control::new(3);
        assert_eq!(control.submit(SequenceId(9), |_| Err("full")), Err("full"));
        control.credit(5, |_, _| unreachable!("there is no sequence"));
        assert!(matches!(*control.credit.lock(), CreditSink::Saved(8)));
    }
}
