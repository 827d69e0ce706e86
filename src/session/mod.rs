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

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

use rocmforge_client::wire::{
    self, ClientMessage, ErrorCode, Flags, FrameHeader, HelloLimits, Op, ServerHello, WireError,
};

mod acting;
pub mod budget;
mod call;
mod coarse;
mod continued;
mod control;
mod daemon;
mod device_load;
mod doctor;
mod drafting;
mod embedding;
mod error;
mod events;
mod extras;
mod generate;
mod host;
mod limit;
mod logged;
mod models;
pub mod outbox;
mod pace;
mod policy;
mod prompt;
mod repeats;
mod residency;
mod responder;
mod restore;
mod samplers;
mod service;
mod sessions;
mod steering;
mod subscribe;
mod text;
mod text_time;
mod thinking;
mod turns;
mod users;

pub use acting::{ActRefused, ActsFor, SUBORDINATE_MIN, SubordinatesError};
use budget::Held;
use call::Call;
use control::Control;
pub use drafting::{DraftModels, DraftRefused, check as check_draft_model};
use error::{Failure, failure, of_codec, of_refusal, of_store, shortage};
pub use error::{share_code, store_code};
pub use events::ModelEvents;
pub use extras::{Extras, ExtrasError};
pub use logged::LoggedUids;
pub use outbox::Outbox;
use pace::Begun;
pub use policy::{Credentials, Policy, Right, Who};
use responder::Responder;
pub use service::{BLOCKING_MAX, OutlivesRestart, Service, Settings};

use crate::aside::ReceivedFd;
use crate::lock::{Mutex, Rank};
use crate::model::store::StoreError;
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
        let begun = Begun::with(frame.payload.len());
        self.handle(frame)?;
        let took = begun.took();
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
        let responder = Responder::new(Arc::clone(&self.connection), stream);
        self.start(frame, control, responder)
    }

    /// Decodes the request, checks it, and has it answered.
    fn start(&mut self, frame: Frame, control: Arc<Control>, responder: Responder) -> Result<(), Fatal> {
        let message = match ClientMessage::decode(frame.header.op, &frame.payload) {
            Ok(message) => message,
            Err(error) => {
                responder.fail(&of_codec(&error));
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
            responder.fail(&failure(ErrorCode::BadDescriptors, &text));
            return Err(fatal(ErrorCode::BadDescriptors, &text));
        }
        if frame.fds_lost {
            responder.fail(&self.without_descriptor());
            return Ok(());
        }
        if let Some(refusal) = &frame.fds_refused {
            responder.fail(&of_refusal(refusal, "too many descriptors wait in requests", 1, "descriptors"));
            return Ok(());
        }
        if let Err(refusal) = self.check_rights(&message) {
            responder.fail(&refusal);
            return Ok(());
        }
        let open = match self.connection.service.budget.open(self.connection.peer.uid) {
            Ok(charge) => Some(charge),
            Err(refusal) => {
                responder.fail(&of_refusal(&refusal, "too many requests are open", 1, "open requests"));
                return Ok(());
            }
        };
        let held = Arc::new(Held { open, ..frame.held });
        let call = Call { connection: Arc::clone(&self.connection), control, _held: held };
        call.answer(message, responder, frame.fds, frame.payload);
        Ok(())
    }

    /// Refuses what the policy in force does not allow.
    fn check_rights(&self, message: &ClientMessage) -> Result<(), Failure> {
        let Connection { service, peer, .. } = &*self.connection;
        let (policy, right) = (service.policy(), Right::of(message));
        let rule = right.map_or("subordinates", Right::key);
        let checked =
            policy.check_acting(peer).and_then(|()| right.map_or(Ok(()), |right| policy.check(peer, right)));
        if checked.is_err()
            && let Some(untold) = service.may_log(peer.real_uid())
        {
            let uid = peer.uid;
            tracing::info!(name: "refused", uid, rule, untold, "a request was refused by the policy");
        }
        checked
    }

    /// Why the descriptor of a request did not come.
    fn without_descriptor(&self) -> Failure {
        let (service, uid) = (&self.connection.service, self.connection.peer.uid);
        if self.connection.peer.by.is_some() {
            return failure(ErrorCode::Forbidden, "a connection that acts for another user passes no files");
        }
        let limit = service.users().of(uid).passed_models;
        if limit.value == 0 {
            return of_store(&StoreError::Quota { uid, limit });
        }
        if !ReceivedFd::may_come_from(uid) {
            return failure(
                ErrorCode::Quota,
                "no descriptor is taken, because many that you sent are still being closed: their file systems do not answer",
            );
        }
        shortage("the kernel could not hand over the model's descriptor")
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

fn fatal(code: ErrorCode, message: &str) -> Fatal {
    Fatal { code, message: message.to_owned() }
}
