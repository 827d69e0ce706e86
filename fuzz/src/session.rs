//! Target `session`: a script of frames, broken frames, descriptors, pauses and ends on a connection to a running
//! daemon.

use std::collections::HashMap;
use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

use rocmforge_client::wire::{
    self, CLIENT_HELLO_BYTES, Cancel, ClientHello, Credit, ErrorCode, Flags, FrameHeader, GenerateRequest,
    HEADER_BYTES, InfoRequest, ListRequest, LoadRequest, Message, Op, PAYLOAD_BYTES_MAX, PingRequest, Prompt,
    PsRequest, SERVER_HELLO_BYTES, ShowRequest, StatusRequest, SubscribeRequest, TokenizeRequest,
    UnloadRequest, WireError, decode, encode_frame,
};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::served::{MODEL, Served};

/// Most actions of a script: more than a connection may have open streams.
const ACTIONS_MAX: usize = 80;

/// Runs `data` as a script. For any input: the daemon answers or closes in time, and every frame is well-formed. Each
/// opened stream ends at most once and sends nothing after its end.
pub fn session(data: &[u8], plant: bool) {
    static SERVED: OnceLock<Served> = OnceLock::new();
    let served = SERVED.get_or_init(Served::start);
    let mut script = Script { stream: served.connect("api.sock"), next: 1, sent: Vec::new(), fds: 0 };
    let mut data = Bytes(data);
    // A daemon that has closed takes no more bytes; its output is still read.
    let _ = script.run(&mut data);
    let _ = script.stream.shutdown(Shutdown::Write);
    let mut said = Vec::new();
    match script.stream.read_to_end(&mut said) {
        Ok(_) => {}
        // The daemon closed with unread input.
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => panic!("the daemon neither answers nor closes: {error}"),
    }
    check(&said, &opened(&script.sent), plant);
}

/// The rest of a script.
struct Bytes<'d>(&'d [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    fn take(&mut self, count: usize) -> &[u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

struct Script {
    stream: UnixStream,
    /// The next stream id.
    next: u32,
    /// All bytes sent, with the hello.
    sent: Vec<u8>,
    /// Number of descriptors to send with the next bytes.
    fds: usize,
}

impl Script {
    fn run(&mut self, data: &mut Bytes<'_>) -> std::io::Result<()> {
        // Most scripts begin with a valid hello; some act for a user, which may be none.
        let hello = ClientHello::new("script");
        let hello = match data.byte() {
            Some(0xff) => None,
            Some(0xfe) => {
                let user = data.byte().unwrap_or(0);
                Some(hello.acting_as(if user == 0xff { u32::MAX } else { user.into() }))
            }
            _ => Some(hello),
        };
        if let Some(hello) = hello {
            self.send(&hello.to_bytes().expect("a short name"))?;
        }
        for _ in 0..ACTIONS_MAX {
            let Some(action) = data.byte() else { break };
            self.act(action, data)?;
        }
        Ok(())
    }

    fn act(&mut self, action: u8, data: &mut Bytes<'_>) -> std::io::Result<()> {
        let text = || Prompt::Text("ab ba".into());
        let ext = Vec::new;
        match action % 20 {
            0 => self.ask(Op::Ping, &PingRequest { payload: data.take(4).to_vec(), ext: ext() }),
            1 => self.ask(Op::Info, &InfoRequest::default()),
            2 => self.ask(Op::List, &ListRequest::default()),
            3 => self.ask(Op::Status, &StatusRequest::default()),
            4 => self.ask(Op::Ps, &PsRequest::default()),
            5 => self.ask(
                Op::Generate,
                &GenerateRequest { ignore_eog: true, ..GenerateRequest::new(MODEL, text()) },
            ),
            6 => self
                .ask(Op::Generate, &GenerateRequest { max_tokens: 3, ..GenerateRequest::new(MODEL, text()) }),
            7 => {
                let text = String::from_utf8_lossy(data.take(8)).into_owned();
                let model = MODEL.into();
                self.ask(
                    Op::Tokenize,
                    &TokenizeRequest { model, text, add_special: true, parse_special: true, ext: ext() },
                )
            }
            8 => self.ask(Op::Unload, &UnloadRequest { name: MODEL.into(), request_id: 0, ext: ext() }),
            9 => {
                let by_descriptor = self.fds > 0;
                let name = if by_descriptor { "passed" } else { MODEL }.into();
                self.ask(Op::Load, &LoadRequest { name, by_descriptor, request_id: 0, ext: ext() })
            }
            10 => self.ask(Op::Subscribe, &SubscribeRequest::default()),
            11 => self.ask(
                Op::Show,
                &ShowRequest {
                    model: MODEL.into(),
                    full: true,
                    skip_metadata: 0,
                    skip_tensors: 0,
                    ext: ext(),
                },
            ),
            12 => {
                let stream = self.recent(data);
                self.steer(stream, Op::Cancel, &Cancel { ext: ext() })
            }
            13 => {
                let (stream, items) = (self.recent(data), u32::from(data.byte().unwrap_or(1)));
                self.steer(stream, Op::Credit, &Credit { items, ext: ext() })
            }
            14 => {
                self.fds = usize::from(action / 20) % 5;
                Ok(())
            }
            // A header from the script, with as much payload as it announces and the script has.
            15 => {
                let header = data.take(HEADER_BYTES).to_vec();
                self.note(&header);
                let len = header.first_chunk::<4>().map_or(0, |len| u32::from_le_bytes(*len)).min(64);
                let payload = data.take(len as usize).to_vec();
                self.send(&[header, payload].concat())
            }
            16 => {
                let bytes = data.take(usize::from(action / 20) + 1).to_vec();
                self.send(&bytes)
            }
            // A valid request with one byte changed.
            17 => {
                let request = GenerateRequest { max_tokens: 2, ..GenerateRequest::new(MODEL, text()) };
                let mut frame = self.frame(Op::Generate, &request);
                let at = usize::from(data.byte().unwrap_or(0)) % frame.len();
                frame[at] ^= data.byte().unwrap_or(1);
                self.note(&frame);
                self.send(&frame)
            }
            18 => self.stream.shutdown(Shutdown::Write),
            _ => {
                std::thread::yield_now();
                Ok(())
            }
        }
    }

    /// One of the last streams, or the next one, which is not open.
    fn recent(&self, data: &mut Bytes<'_>) -> u32 {
        let back = u32::from(data.byte().unwrap_or(1) % 4);
        self.next.saturating_sub(2 * back)
    }

    fn ask(&mut self, op: Op, request: &impl Message) -> std::io::Result<()> {
        let frame = self.frame(op, request);
        self.note(&frame);
        self.send(&frame)
    }

    /// A frame on the next stream.
    fn frame(&mut self, op: Op, request: &impl Message) -> Vec<u8> {
        let mut frame =
            encode_frame(self.next, op, Flags::NONE, PAYLOAD_BYTES_MAX, request).expect("a small request");
        frame[11] = u8::try_from(self.fds).unwrap_or(0);
        self.next = self.next.saturating_add(2);
        frame
    }

    /// Advances `next` past the stream of a header.
    fn note(&mut self, frame: &[u8]) {
        let Some(bytes) = frame.first_chunk::<HEADER_BYTES>() else { return };
        if let Ok(header) = FrameHeader::parse(bytes, PAYLOAD_BYTES_MAX) {
            self.next = self.next.max(header.stream.saturating_add(2) | 1);
        }
    }

    fn steer(&mut self, stream: u32, op: Op, message: &impl Message) -> std::io::Result<()> {
        let frame = encode_frame(stream, op, Flags::NONE, PAYLOAD_BYTES_MAX, message);
        self.send(&frame.expect("a small message"))
    }

    fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.sent.extend(bytes);
        let count = std::mem::take(&mut self.fds);
        if count == 0 || bytes.is_empty() {
            return self.stream.write_all(bytes);
        }
        let file = File::open("/dev/null")?;
        let fds: Vec<BorrowedFd<'_>> = vec![file.as_fd(); count];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        let sent = rustix::net::sendmsg(
            self.stream.as_fd(),
            &[IoSlice::new(bytes)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        )?;
        self.stream.write_all(&bytes[sent..])
    }
}

/// The op of each stream, as the daemon sees these bytes. After a frame with a false length, a reader finds headers in
/// the middle of other data.
fn opened(sent: &[u8]) -> HashMap<u32, Op> {
    let mut opened = HashMap::new();
    let mut rest = sent.get(CLIENT_HELLO_BYTES..).unwrap_or_default();
    while let Some((bytes, after)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let Ok(header) = FrameHeader::parse(bytes, PAYLOAD_BYTES_MAX) else { break };
        opened.entry(header.stream).or_insert(header.known_op().unwrap_or(Op::Error));
        rest = after.get(header.len as usize..).unwrap_or_default();
    }
    opened
}

/// Checks that the daemon's output is a hello and whole frames. Each frame is on a stream that was opened and has not
/// ended, or it is the last one, on stream 0.
fn check(said: &[u8], opened: &HashMap<u32, Op>, plant: bool) {
    let Some((hello, mut rest)) = said.split_first_chunk::<SERVER_HELLO_BYTES>() else {
        return assert!(said.is_empty(), "half a hello: {said:?}");
    };
    wire::ServerHello::parse(hello).expect("a hello");
    let mut ended = HashMap::new();
    while let Some((bytes, after)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let header = FrameHeader::parse(bytes, PAYLOAD_BYTES_MAX).expect("a header");
        let Some((payload, after)) = after.split_at_checked(header.len as usize) else { break };
        rest = after;
        let op = header.known_op().expect("an op of the protocol");
        if header.stream == 0 {
            assert_eq!(op, Op::Error);
            decode::<WireError>(payload).expect("an error");
            assert!(rest.is_empty(), "frames after the last one");
            break;
        }
        let asked = opened.get(&header.stream).expect("a stream that was opened");
        assert!(!ended.contains_key(&header.stream), "a frame after the end of stream {}", header.stream);
        match op {
            Op::Item => {}
            Op::End => drop(ended.insert(header.stream, 0)),
            Op::Reply => {
                wire::reply_of(*asked, payload).expect("the reply to what was asked");
                ended.insert(header.stream, 0);
            }
            Op::Error => {
                let error: WireError = decode(payload).expect("an error");
                // No script may cause an internal error of the daemon.
                assert_ne!(error.code, ErrorCode::Internal as u16, "{error:?}");
                if plant && error.code == ErrorCode::Cancelled as u16 {
                    crate::planted(b"ROCm");
                }
                ended.insert(header.stream, error.code);
            }
            other => panic!("{other:?} is not a daemon's"),
        }
    }
}
