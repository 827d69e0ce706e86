//! A client of the daemon that connects when needed, reconnects after a restart, and repeats calls that are safe to
//! repeat.

use std::collections::hash_map::RandomState;
use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::connection::{Connection, lock};
use crate::embedding::Embedding;
use crate::error::{ClientError, ProtocolError};
use crate::generation::Generation;
use crate::options::Options;
use crate::relevance::Relevance;
use crate::wire::{
    Call, CancelRequestsReply, CancelRequestsRequest, DetokenizeReply, DetokenizeRequest, DoctorReply,
    DoctorRequest, FailRequest, ForgetSessionReply, ForgetSessionRequest, GenerateRequest, InfoReply,
    InfoRequest, LimitUserReply, LimitUserRequest, ListReply, ListRequest, LoadReply, LoadRequest, PingReply,
    PingRequest, PsReply, PsRequest, RequestScope, SessionScope, SessionsReply, SessionsRequest, ShowReply,
    ShowRequest, StatusReply, StatusRequest, TokenizeReply, TokenizeRequest, UnloadReply, UnloadRequest,
    UsersReply, UsersRequest,
};

/// Pause before a call is repeated, if the daemon names none.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Most parts of one list: each fills a frame, so a list that has more is no list of models or tensors.
const PARTS_MAX: u32 = 256;

/// Counts the parts of a list, which a broken daemon would send without end.
#[derive(Debug, Default)]
pub(crate) struct Parts(u32);

/// A client of one daemon. Every call except [`Client::generate`] is safe to repeat, so the client repeats it on a
/// new connection if the old one ended. `generate` only reconnects: a request that was sent is never repeated.
#[derive(Debug)]
pub struct Client {
    options: Options,
    connection: Mutex<Option<Connection>>,
}

impl Client {
    /// Creates a client; it connects at the first call.
    pub fn new(options: Options) -> Self {
        Self { options, connection: Mutex::new(None) }
    }

    /// The current connection; connects if there is none.
    ///
    /// # Errors
    /// As [`Connection::connect`].
    pub fn connection(&self) -> Result<Connection, ClientError> {
        let mut current = lock(&self.connection);
        if let Some(connection) = current.as_ref().filter(|connection| connection.is_alive()) {
            return Ok(connection.clone());
        }
        let connection = Connection::connect(&self.options)?;
        *current = Some(connection.clone());
        Ok(connection)
    }

    /// Sends an echo request.
    ///
    /// # Errors
    /// As [`Connection::call`]; the same for every method here.
    pub fn ping(&self, payload: &[u8]) -> Result<PingReply, ClientError> {
        self.call(&PingRequest { payload: payload.to_vec(), ext: vec![] })
    }

    /// The daemon's version, requests and limits.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn info(&self) -> Result<InfoReply, ClientError> {
        self.call(&InfoRequest::default())
    }

    /// All models that the daemon knows by name, in as many calls as needed.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn list(&self) -> Result<ListReply, ClientError> {
        self.list_of(None)
    }

    /// As [`Client::list`], as that user gets it: with the names of the files that it passed, instead of the caller's.
    ///
    /// # Errors
    /// `Forbidden` without the right `policy.see`; else as [`Connection::call`].
    pub fn list_of(&self, uid: Option<u32>) -> Result<ListReply, ClientError> {
        let mut whole = self.call(&ListRequest::of(uid, ""))?;
        let mut parts = Parts::default();
        while whole.more
            && let Some(last) = whole.models.last()
        {
            self.one_more(&mut parts)?;
            let mut next = self.call(&ListRequest::of(uid, &last.name))?;
            whole.more = next.more && !next.models.is_empty();
            whole.models.append(&mut next.models);
        }
        Ok(whole)
    }

    /// Describes one model; with `full`, all its metadata and tensors too, in as many calls as needed.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn show(&self, model: &str, full: bool) -> Result<ShowReply, ClientError> {
        let mut request =
            ShowRequest { model: model.to_owned(), full, skip_metadata: 0, skip_tensors: 0, ext: vec![] };
        let mut whole = self.call(&request)?;
        let mut parts = Parts::default();
        loop {
            let (metadata, tensors) = (count(&whole.metadata), count(&whole.tensors));
            let complete = metadata >= whole.metadata_total && tensors >= whole.tensors_total;
            if !full || complete {
                return Ok(whole);
            }
            (request.skip_metadata, request.skip_tensors) = (metadata, tensors);
            self.one_more(&mut parts)?;
            let mut more = self.call(&request)?;
            if more.metadata.is_empty() && more.tensors.is_empty() {
                return Ok(whole);
            }
            whole.metadata.append(&mut more.metadata);
            whole.tensors.append(&mut more.tensors);
        }
    }

    /// Maps a model by name.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn load(&self, name: &str) -> Result<LoadReply, ClientError> {
        self.call(&load_request(name, false))
    }

    /// Opens a file with the caller's rights and passes it to the daemon under `name`, or under its file name without
    /// `.gguf`.
    ///
    /// # Errors
    /// [`ClientError::File`], and as [`Connection::call`].
    pub fn load_file(&self, path: &Path, name: Option<&str>) -> Result<LoadReply, ClientError> {
        let failed = |reason: &str| ClientError::File { path: path.to_owned(), reason: reason.to_owned() };
        let name = match name {
            Some(name) => name.to_owned(),
            None if path.file_name().is_none() => return Err(failed("the path names no file")),
            None => model_name(path).ok_or_else(|| failed("its name is not UTF-8: give the model a name"))?,
        };
        let file = open_regular(path).map_err(|error| failed(&error.to_string()))?;
        self.load_descriptor(file.as_fd(), &name)
    }

    /// Passes an open file, read-only and regular, to the daemon under `name`.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn load_descriptor(&self, file: BorrowedFd<'_>, name: &str) -> Result<LoadReply, ClientError> {
        self.call_with_descriptors(&load_request(name, true), &[file])
    }

    /// Unmaps a model once its requests end.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn unload(&self, name: &str) -> Result<UnloadReply, ClientError> {
        self.unload_of(None, name)
    }

    /// As [`Client::unload`], of a file that this user passed.
    ///
    /// # Errors
    /// `Forbidden` without the right `policy.manage`; else as [`Connection::call`].
    pub fn unload_of(&self, uid: Option<u32>, name: &str) -> Result<UnloadReply, ClientError> {
        self.call(&UnloadRequest::of(uid, name, random_request_id()))
    }

    /// All running and waiting requests, in as many calls as needed.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn ps(&self) -> Result<PsReply, ClientError> {
        let mut whole = self.call(&PsRequest::default())?;
        let mut parts = Parts::default();
        while whole.more
            && let Some(last) = whole.sequences.last()
        {
            self.one_more(&mut parts)?;
            let mut next = self.call(&PsRequest { after: last.id, ext: vec![] })?;
            whole.more = next.more && !next.sequences.is_empty();
            whole.sequences.append(&mut next.sequences);
        }
        Ok(whole)
    }

    /// Cancels requests for tokens of any connection, the caller's own or, for an administrator, anybody's. Returns
    /// their number.
    ///
    /// # Errors
    /// `NotFound` if no such request is live, `Forbidden` for another user's; else [`ClientError`] of the call.
    pub fn cancel_requests(&self, scope: RequestScope) -> Result<CancelRequestsReply, ClientError> {
        self.call(&CancelRequestsRequest { scope, ext: vec![] })
    }

    /// Changes the limits of a user, or returns limits: of one user, or of all that have some of their own.
    ///
    /// # Errors
    /// `Forbidden` without the right `policy.manage`; else as [`Connection::call`].
    pub fn limit_user(&self, request: &LimitUserRequest) -> Result<LimitUserReply, ClientError> {
        self.call(request)
    }

    /// Returns holdings of everything that users share, in as many calls as needed: of the caller's own user, and of all
    /// users for an administrator.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn users(&self) -> Result<UsersReply, ClientError> {
        let mut whole = self.call(&UsersRequest::default())?;
        let mut parts = Parts::default();
        while whole.more
            && let Some(last) = whole.users.last()
        {
            self.one_more(&mut parts)?;
            let mut next = self.call(&UsersRequest { after: Some(last.uid), ext: vec![] })?;
            whole.more = next.more && !next.users.is_empty();
            whole.users.append(&mut next.users);
        }
        Ok(whole)
    }

    /// The sessions of the caller's own user.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn sessions(&self) -> Result<SessionsReply, ClientError> {
        self.call(&SessionsRequest::default())
    }

    /// Forgets a session of the caller's own user, or all. Returns their number: 0 if there is none of that name.
    ///
    /// # Errors
    /// `Busy` while a request uses one of them: then none is forgotten; else as [`Connection::call`].
    pub fn forget_session(&self, name: Option<&str>) -> Result<ForgetSessionReply, ClientError> {
        let scope = name.map_or(SessionScope::All, |name| SessionScope::Name(name.to_owned()));
        self.call(&ForgetSessionRequest { scope, ext: vec![] })
    }

    /// The state of the daemon and its devices.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn status(&self) -> Result<StatusReply, ClientError> {
        self.call(&StatusRequest::default())
    }

    /// The daemon's checks of GPUs: what works, what is missing, how to fix it. Takes up to half a minute.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn doctor(&self) -> Result<DoctorReply, ClientError> {
        self.call(&DoctorRequest::default())
    }

    /// Tokenizes a text.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn tokenize(&self, request: &TokenizeRequest) -> Result<TokenizeReply, ClientError> {
        self.call(request)
    }

    /// The text of token ids.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn detokenize(&self, request: &DetokenizeRequest) -> Result<DetokenizeReply, ClientError> {
        self.call(request)
    }

    /// Starts a generation. It is not repeated: a broken-off answer is not restarted behind the caller's back.
    ///
    /// # Errors
    /// The sending errors of [`Connection::call`].
    pub fn generate(&self, request: &GenerateRequest) -> Result<Generation, ClientError> {
        self.connection()?.generate(request)
    }

    /// The embedding of the request's prompt, normalised and pooled as the model's file says unless the request states
    /// [other options](GenerateRequest::with_embedding). Sampling options count for nothing.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn embed(&self, request: &GenerateRequest) -> Result<Embedding, ClientError> {
        let mut generation = self.generate(&Embedding::request(request))?;
        let items = generation.by_ref().collect::<Result<Vec<_>, _>>()?;
        Embedding::of(items, generation.end())
    }

    /// How relevant the request's [document](GenerateRequest::with_document) is to its prompt.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn rank(&self, request: &GenerateRequest) -> Result<Relevance, ClientError> {
        let mut generation = self.generate(request)?;
        let items = generation.by_ref().collect::<Result<Vec<_>, _>>()?;
        Relevance::of(items, generation.end())
    }

    /// Requests an error of this code, for tests of error paths; the daemon answers nothing else.
    pub fn fail(&self, code: u16) -> ClientError {
        match self.connection() {
            Ok(connection) => connection.fail(&FailRequest { code, ext: vec![] }),
            Err(error) => error,
        }
    }

    /// Sends a request, and repeats it for `retry_timeout` if the connection ended or the daemon is stopping.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub fn call<C: Call>(&self, request: &C) -> Result<C::Reply, ClientError> {
        self.call_with_descriptors(request, &[])
    }

    /// Allows the request for one more part of a list, or ends the connection.
    pub(crate) fn one_more(&self, parts: &mut Parts) -> Result<(), ClientError> {
        parts.0 += 1;
        if parts.0 < PARTS_MAX {
            return Ok(());
        }
        let error = ProtocolError::TooManyParts { max: PARTS_MAX };
        Err(self.connection()?.end_with(error))
    }

    fn call_with_descriptors<C: Call>(
        &self,
        request: &C,
        fds: &[BorrowedFd<'_>],
    ) -> Result<C::Reply, ClientError> {
        let give_up = Instant::now() + self.options.retry_timeout;
        loop {
            let connection = self.connection()?;
            let error = match connection.send_with_descriptors(request, fds).and_then(|reply| reply.wait()) {
                Err(error) if error.is_worth_repeating() => error,
                outcome => return outcome,
            };
            let pause = match &error {
                ClientError::Server(error) => Duration::from_millis(error.retry_after_ms.into()),
                _ => Duration::ZERO,
            };
            let pause = pause.max(RETRY_PAUSE);
            if Instant::now() + pause >= give_up {
                return Err(error);
            }
            std::thread::sleep(pause);
            // A stopping daemon keeps its connections open, so the next call must use a new one.
            lock(&self.connection).take_if(|current| current.is(&connection));
        }
    }
}

/// Opens a file for reading. Without `NONBLOCK`, open(2) of a FIFO without a writer would block for good. Without
/// `NOCTTY`, a terminal could become the process's controlling terminal.
fn open_regular(path: &Path) -> io::Result<File> {
    let kind = |what: &str| io::Error::other(format!("it is {what}, not a regular file"));
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        // open(2)'s error for a socket.
        Err(Errno::NXIO) => return Err(kind("a socket or a missing device")),
        opened => File::from(opened?),
    };
    let found = file.metadata()?.file_type();
    match () {
        () if found.is_file() => Ok(file),
        () if found.is_dir() => Err(kind("a directory")),
        () if found.is_fifo() => Err(kind("a pipe")),
        () => Err(kind("a device")),
    }
}

fn load_request(name: &str, by_descriptor: bool) -> LoadRequest {
    LoadRequest { name: name.to_owned(), by_descriptor, request_id: random_request_id(), ext: vec![] }
}

fn count<T>(list: &[T]) -> u32 {
    u32::try_from(list.len()).unwrap_or(u32::MAX)
}

/// The model's name for a file: the file name without `.gguf`.
pub(crate) fn model_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    Some(name.strip_suffix(".gguf").unwrap_or(name).to_owned())
}

/// A number that no other request has: 128 bits from the keys that the standard library takes from the kernel for its
/// hash maps.
pub fn random_request_id() -> u128 {
    let half = || u128::from(RandomState::new().build_hasher().finish());
    half() << 64 | half()
}
