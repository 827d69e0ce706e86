//! A server that follows its script: one listener, with each connection's script in its own thread.

use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;

use interprocess::local_socket::{GenericFilePath, ListenerOptions, prelude::*};
use interprocess::os::unix::uds_local_socket::{Listener, Stream};
use rocmforge_client::wire::*;
use rocmforge_client::{Options, ServerTrust};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use tempfile::TempDir;

/// A listening server; [`Server::join`] joins its scripts.
pub struct Server {
    dir: TempDir,
    thread: Option<JoinHandle<()>>,
}

/// A client's connection.
pub struct Peer {
    stream: Stream,
    /// Flags of the sent frames.
    pub flags: Flags,
}

/// A frame from the client.
pub struct Request {
    pub header: FrameHeader,
    pub message: ClientMessage,
    pub fds: Vec<OwnedFd>,
}

pub fn listen(path: &Path) -> Listener {
    let name = path.to_fs_name::<GenericFilePath>().unwrap();
    ListenerOptions::new().name(name).reclaim_name(false).create_sync_as().unwrap()
}

pub fn accept(listener: &Listener) -> Peer {
    Peer { stream: listener.accept().unwrap(), flags: Flags::NONE }
}

impl Server {
    /// Runs `script` with the listener.
    pub fn new(script: impl FnOnce(Listener) + Send + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = listen(&dir.path().join("api.sock"));
        Self { dir, thread: Some(std::thread::spawn(move || script(listener))) }
    }

    /// Accepts one connection, answers its hello, and runs `script` with it.
    pub fn greeting(script: impl FnOnce(Peer) + Send + 'static) -> Self {
        Self::new(move |listener| {
            let mut peer = accept(&listener);
            peer.greet();
            script(peer);
        })
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("api.sock")
    }

    pub fn options(&self) -> Options {
        Options { socket: self.socket(), trust: ServerTrust::Usual, ..Options::default() }
    }

    /// Checks that the script ran to its end without a failed assertion.
    pub fn join(mut self) {
        self.thread.take().unwrap().join().unwrap();
    }
}

impl Peer {
    pub fn client_hello(&mut self) -> ClientHello {
        let mut bytes = [0; CLIENT_HELLO_BYTES];
        self.stream.read_exact(&mut bytes).unwrap();
        ClientHello::parse(&bytes).unwrap()
    }

    pub fn greet(&mut self) {
        let hello = self.client_hello();
        let answer = ServerOffer::default().answer(&hello);
        if answer.features & FEATURE_CHECKSUM != 0 {
            self.flags = Flags::CRC;
        }
        self.write(&answer.to_bytes());
    }

    /// For scripts whose client may be gone.
    pub fn try_send<T: Message>(&mut self, stream: u32, op: Op, message: &T) {
        let frame = encode_frame(stream, op, self.flags, PAYLOAD_BYTES_MAX, message).unwrap();
        let _ = self.stream.write_all(&frame);
    }

    pub fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// The client's process.
    pub fn pid(&self) -> i32 {
        self.stream.peer_creds().unwrap().pid().unwrap()
    }

    /// `None` once the client has closed.
    pub fn request(&mut self) -> Option<Request> {
        let mut header = [0; HEADER_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut header)];
        let received =
            recvmsg(self.stream.as_fd(), &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC).ok()?.bytes;
        if received == 0 {
            return None;
        }
        let fds = control.drain().flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<_>>(),
            _ => vec![],
        });
        let fds: Vec<_> = fds.collect();
        self.stream.read_exact(&mut header[received..]).unwrap();
        let header = FrameHeader::parse(&header, PAYLOAD_BYTES_MAX).unwrap();
        let mut payload = vec![0; header.len as usize];
        self.stream.read_exact(&mut payload).unwrap();
        header.check_payload(&payload).unwrap();
        assert_eq!(usize::from(header.n_fds), fds.len());
        let message = ClientMessage::decode(header.op, &payload).unwrap();
        Some(Request { header, message, fds })
    }

    pub fn send<T: Message>(&mut self, stream: u32, op: Op, message: &T) {
        let frame = encode_frame(stream, op, self.flags, PAYLOAD_BYTES_MAX, message).unwrap();
        self.write(&frame);
    }

    pub fn fail(&mut self, stream: u32, code: ErrorCode) {
        self.send(stream, Op::Error, &WireError::new(code, "as the script says"));
    }

    pub fn echo(&mut self, request: &Request) {
        let ClientMessage::Ping(ping) = &request.message else { panic!("{:?}", request.message) };
        let reply = PingReply { payload: ping.payload.clone(), ext: vec![] };
        self.send(request.header.stream, Op::Reply, &reply);
    }

    /// Takes requests until the client closes.
    pub fn drain(&mut self) -> Vec<ClientMessage> {
        std::iter::from_fn(|| self.request().map(|request| request.message)).collect()
    }
}

pub fn item(text: &str) -> GenerateItem {
    GenerateItem { ids: vec![1], text: text.into(), logprobs: vec![], prompt_ids: vec![], ext: vec![] }
}

pub fn end() -> GenerateEnd {
    GenerateEnd {
        stop_reason: StopReason::MaxTokens,
        text: "!".into(),
        usage: Usage { prompt_tokens: 2, generated_tokens: 3 },
        timings: Timings { queue_us: 1500, load_us: 0, prefill_us: 2000, decode_us: 4000 },
        seed: 9,
        ext: vec![],
    }
}

pub fn summary(name: &str) -> ModelSummary {
    ModelSummary {
        name: name.into(),
        state: ModelState::Mapped,
        file_bytes: 1,
        architecture: "llama".into(),
        sequences: 0,
        reason: String::new(),
        ext: vec![],
    }
}

/// Short enough that a test which waits for it in vain is not slow.
pub const SOON: Duration = Duration::from_millis(200);
