//! Bytes and file descriptors of one connection, cut into frames.
//!
//! One `recvmsg` reads as many small frames as there are. The kernel delivers descriptors with the bytes that they were
//! sent with, and ends the read there. So a read has descriptors of one message at most, and they belong to the frame
//! that begins in this read and announces some. Without such a frame they are refused. The rest of a long payload is read
//! without room for descriptors: the kernel drops a stray one, says so, and it is refused.
//!
//! After a read that left nothing, the next one waits for the kernel's sign: a frame costs no second call in vain.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::time::Duration;

use interprocess::os::unix::uds_local_socket::tokio::Stream;
use rocmforge_client::wire::{
    CLIENT_HELLO_BYTES, ErrorCode, FDS_MAX, FrameHeader, HEADER_BYTES, HeaderError, MAGIC,
};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use tokio::io::Interest;
use tokio::time::{Instant, timeout_at};

use crate::aside::ReceivedFd;
use crate::session::budget::{Held, UserBudget};
use crate::session::{Frame, share_code};
use crate::share::Refusal;

/// Time limit for a client's hello.
pub const HELLO_TIME: Duration = Duration::from_secs(5);

/// Time limit from a frame's first byte to its last.
pub const FRAME_TIME: Duration = Duration::from_secs(10);

/// Most bytes allocated for a payload ahead of its arrival.
const AHEAD_BYTES: usize = 64 << 10;

/// Bytes of one read of frames: some 150 of the smallest.
const READ_BYTES: usize = 4 << 10;

/// Room for bytes read ahead that a connection keeps between its frames.
const AHEAD_KEPT_BYTES: usize = 256;

/// Why no frame was received.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// The client hung up between frames.
    #[error("the client hung up")]
    HungUp,
    /// The client hung up inside a hello or a frame.
    #[error("the client hung up after {have} of {want} bytes")]
    CutShort {
        /// Bytes received.
        have: usize,
        /// Bytes announced.
        want: usize,
    },
    /// The first bytes are not a hello of this protocol.
    #[error("the first bytes are not a hello of this protocol")]
    NotProtocol,
    /// The hello did not arrive in time.
    #[error("no hello arrived within {} s", HELLO_TIME.as_secs())]
    HelloTimeout,
    /// A frame began and did not end in time.
    #[error("a frame began and did not end within {} s", FRAME_TIME.as_secs())]
    FrameTimeout,
    /// The header is invalid.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// Descriptors where none belong, or a number other than announced.
    #[error("{got} file descriptors arrived, {announced} were announced")]
    Descriptors {
        /// Descriptors received.
        got: usize,
        /// Descriptors announced by the header.
        announced: u8,
    },
    /// Descriptors that the daemon does not accept; the kernel dropped them.
    #[error("file descriptors arrived where none belong, or more than the {FDS_MAX} that a frame may have")]
    DescriptorsCutOff,
    /// The user's requests, or all users' requests together, leave no room for the payload.
    #[error("no room for a frame of {len} bytes within {} s: {}", FRAME_TIME.as_secs(), refusal.told(1 << 10, "KiB"))]
    NoRoom {
        /// Bytes of the payload.
        len: u32,
        /// The numbers.
        refusal: Refusal,
    },
    /// The operating system refused.
    #[error("reading failed: {0}")]
    Os(#[from] io::Error),
}

impl ReceiveError {
    /// Code to send before the connection closes; `None` when the client is gone.
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::HungUp | Self::CutShort { .. } | Self::Os(_) => None,
            Self::NotProtocol => Some(ErrorCode::NotProtocol),
            Self::HelloTimeout => Some(ErrorCode::HandshakeTimeout),
            Self::FrameTimeout => Some(ErrorCode::FrameTimeout),
            Self::Header(error) => Some(error.code()),
            Self::NoRoom { refusal, .. } => Some(share_code(refusal)),
            Self::Descriptors { .. } | Self::DescriptorsCutOff => Some(ErrorCode::BadDescriptors),
        }
    }
}

/// Reads the client's first message: a fixed number of bytes, within [`HELLO_TIME`], without descriptors.
///
/// Reads the first four bytes one by one: a client of another protocol may send few bytes and then wait for an answer.
///
/// # Errors
/// [`ReceiveError`].
pub async fn hello(stream: &Stream) -> Result<[u8; CLIENT_HELLO_BYTES], ReceiveError> {
    let mut bytes = [0; CLIENT_HELLO_BYTES];
    let read = async {
        let (first, rest) = bytes.split_at_mut(MAGIC.len());
        for (n, expected) in MAGIC.into_iter().enumerate() {
            let byte = &mut first[n..=n];
            fill(stream, byte, n == 0).await?;
            if *byte != [expected] {
                return Err(ReceiveError::NotProtocol);
            }
        }
        fill(stream, rest, false).await
    };
    let deadline = Instant::now() + HELLO_TIME;
    timeout_at(deadline, read).await.map_err(|_| ReceiveError::HelloTimeout)??;
    Ok(bytes)
}

/// Cuts a connection's bytes into frames, after its hello.
pub(super) struct Frames<'a> {
    stream: &'a Stream,
    payload_bytes_max: u32,
    room: &'a UserBudget,
    /// Whether the user may pass files now.
    may_pass: &'a (dyn Fn() -> bool + Sync),
    /// Bytes that were read and not yet cut, from `cut` on. Empty between most frames, so that an idle connection costs
    /// no memory.
    ahead: Vec<u8>,
    cut: usize,
    /// Descriptors of the last read that no frame has taken.
    arrived: Option<Arrived>,
}

/// Descriptors that came with a read.
struct Arrived {
    /// Where the frame that they belong to begins in `ahead`.
    at: usize,
    fds: Vec<ReceivedFd>,
    fds_lost: bool,
}

impl<'a> Frames<'a> {
    /// Payloads may have at most `payload_bytes_max` bytes; they and descriptors are charged to `room`. While the user may
    /// pass no files, the kernel drops its descriptors: no thread of the daemon ever closes one, which asks its server.
    pub fn new(
        stream: &'a Stream,
        payload_bytes_max: u32,
        room: &'a UserBudget,
        may_pass: &'a (dyn Fn() -> bool + Sync),
    ) -> Self {
        Self { stream, payload_bytes_max, room, may_pass, ahead: Vec::new(), cut: 0, arrived: None }
    }

    /// The next frame. Waits for its first byte without a time limit.
    ///
    /// Waits up to [`FRAME_TIME`] for room before it allocates the payload. Meanwhile it reads nothing, so the client
    /// waits too. Frames that were read with the one before come without a wait, but other tasks get their turn.
    ///
    /// Do not drop this future halfway: the bytes read so far would be lost.
    ///
    /// # Errors
    /// [`ReceiveError`]; the connection must end.
    pub async fn next(&mut self) -> Result<Frame, ReceiveError> {
        tokio::task::consume_budget().await;
        if self.unread().is_empty() && self.read().await? == 0 {
            return Err(ReceiveError::HungUp);
        }
        let header = match self.header()? {
            Some(header) => header,
            None => timeout_at(Instant::now() + FRAME_TIME, self.rest_of_header())
                .await
                .map_err(|_| ReceiveError::FrameTimeout)??,
        };
        let arrived = self.descriptors_of(&header)?;
        self.cut += HEADER_BYTES;
        let (mut fds, fds_lost) = arrived.map_or((Vec::new(), false), |it| (it.fds, it.fds_lost));
        let (descriptors, fds_refused) = match self.room.descriptors(fds.len()) {
            Ok(charge) => (charge, None),
            Err(refusal) => {
                fds.clear();
                (None, Some(refusal))
            }
        };
        let len = header.len;
        let charged = self.room.payload(len, FRAME_TIME).await;
        let charge = charged.map_err(|refusal| ReceiveError::NoRoom { len, refusal })?;
        let payload = self.payload(len as usize).await?;
        header.check_payload(&payload)?;
        let held = Held { payload: charge, descriptors, open: None };
        Ok(Frame { header, payload, fds, fds_lost, fds_refused, held })
    }

    fn unread(&self) -> &[u8] {
        self.ahead.get(self.cut..).unwrap_or_default()
    }

    /// The header that the unread bytes begin with, if it is whole.
    fn header(&self) -> Result<Option<FrameHeader>, ReceiveError> {
        let Some(header) = self.unread().first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        Ok(Some(FrameHeader::parse(header, self.payload_bytes_max)?))
    }

    async fn rest_of_header(&mut self) -> Result<FrameHeader, ReceiveError> {
        loop {
            if let Some(header) = self.header()? {
                return Ok(header);
            }
            let have = self.unread().len();
            if self.read().await? == 0 {
                return Err(ReceiveError::CutShort { have, want: HEADER_BYTES });
            }
        }
    }

    /// Reads the available bytes, at least one; 0 if the client hung up.
    async fn read(&mut self) -> Result<usize, ReceiveError> {
        self.ahead.drain(..self.cut);
        if let Some(arrived) = &mut self.arrived {
            arrived.at = arrived.at.saturating_sub(self.cut);
        }
        self.cut = 0;
        self.ahead.shrink_to(AHEAD_KEPT_BYTES);
        let (from, ahead) = (self.ahead.len(), &mut self.ahead);
        let uid = self.room.uid();
        let may_pass = self.may_pass;
        let sender = || (may_pass() && ReceivedFd::may_come_from(uid)).then_some(uid);
        let received = receive(self.stream, sender, |call| {
            let mut bytes = [0; READ_BYTES];
            let received = call(&mut bytes)?;
            ahead.extend_from_slice(bytes.get(..received.bytes).unwrap_or_default());
            Ok((received, READ_BYTES))
        })
        .await?;
        let Received { bytes, fds, fds_lost } = received;
        if fds_lost || !fds.is_empty() {
            if let Some(before) = &self.arrived {
                // Two messages with descriptors for one header.
                return Err(ReceiveError::Descriptors { got: before.fds.len() + fds.len(), announced: 0 });
            }
            match self.claimed_at(from) {
                Some(at) => self.arrived = Some(Arrived { at, fds, fds_lost }),
                None => return Err(unclaimed(&fds, fds_lost)),
            }
        }
        Ok(bytes)
    }

    /// Where the frame begins that has the descriptors which came with the bytes `from` there on. It is the first of these
    /// that announces some, or whose header is not whole yet.
    fn claimed_at(&self, from: usize) -> Option<usize> {
        let mut at = 0;
        loop {
            let rest = self.ahead.get(at..).filter(|rest| !rest.is_empty())?;
            let Some(header) = rest.first_chunk::<HEADER_BYTES>() else { return (at >= from).then_some(at) };
            // A false header is found when its frame is cut.
            let header = FrameHeader::parse(header, self.payload_bytes_max).ok()?;
            if at >= from && header.n_fds > 0 {
                return Some(at);
            }
            at = at.saturating_add(HEADER_BYTES).saturating_add(header.len as usize);
        }
    }

    /// The descriptors of the frame that the unread bytes begin with.
    fn descriptors_of(&mut self, header: &FrameHeader) -> Result<Option<Arrived>, ReceiveError> {
        let cut = self.cut;
        match (self.arrived.take_if(|arrived| arrived.at == cut), header.n_fds) {
            (None, 0) => Ok(None),
            (None, announced) => Err(ReceiveError::Descriptors { got: 0, announced }),
            (Some(Arrived { fds, fds_lost, .. }), 0) => Err(unclaimed(&fds, fds_lost)),
            (Some(arrived), announced) if arrived.fds_lost || arrived.fds.len() == usize::from(announced) => {
                Ok(Some(arrived))
            }
            (Some(arrived), announced) => {
                Err(ReceiveError::Descriptors { got: arrived.fds.len(), announced })
            }
        }
    }

    /// Takes a payload of the unread bytes, and reads what they lack. Allocates it as it arrives, so that a header alone
    /// costs no memory.
    async fn payload(&mut self, len: usize) -> Result<Vec<u8>, ReceiveError> {
        let there = self.unread().len().min(len);
        let mut payload = self.unread().get(..there).unwrap_or_default().to_vec();
        self.cut += there;
        if payload.len() == len {
            return Ok(payload);
        }
        let read = async {
            while payload.len() < len {
                let have = payload.len();
                let more = (len - have).min(AHEAD_BYTES);
                payload.reserve_exact(more);
                payload.resize(have + more, 0);
                fill(self.stream, &mut payload[have..], false).await?;
            }
            Ok(payload)
        };
        timeout_at(Instant::now() + FRAME_TIME, read).await.map_err(|_| ReceiveError::FrameTimeout)?
    }
}

/// The kernel does not report how many descriptors it dropped, only that some arrived and did not fit.
fn unclaimed(fds: &[ReceivedFd], fds_lost: bool) -> ReceiveError {
    match fds_lost {
        true => ReceiveError::DescriptorsCutOff,
        false => ReceiveError::Descriptors { got: fds.len(), announced: 0 },
    }
}

/// Fills `bytes`, which come without descriptors.
async fn fill(stream: &Stream, bytes: &mut [u8], may_be_empty: bool) -> Result<(), ReceiveError> {
    let want = bytes.len();
    let mut have = 0;
    while have < want {
        let rest = &mut bytes[have..];
        let received = receive(stream, || None, |call| Ok((call(rest)?, rest.len()))).await?;
        match received.bytes {
            0 if have == 0 && may_be_empty => return Err(ReceiveError::HungUp),
            0 => return Err(ReceiveError::CutShort { have, want }),
            bytes => have += bytes,
        }
        if received.fds_lost {
            return Err(ReceiveError::DescriptorsCutOff);
        }
    }
    Ok(())
}

struct Received {
    bytes: usize,
    fds: Vec<ReceivedFd>,
    /// The kernel dropped descriptors: none were to come, or the process had no free ones for all that arrived.
    fds_lost: bool,
}

/// One `recvmsg` into a buffer.
type Call<'a> = dyn FnMut(&mut [u8]) -> io::Result<Received> + 'a;

/// Has `read` call `recvmsg` once there are bytes, with room for descriptors `from` a user, asked at each call.
/// `read` returns the buffer's size too. A read that does not fill it leaves nothing, unless it ended at descriptors or at
/// the client's end.
async fn receive(
    stream: &Stream,
    from: impl Fn() -> Option<u32>,
    mut read: impl FnMut(&mut Call<'_>) -> io::Result<(Received, usize)>,
) -> Result<Received, ReceiveError> {
    let received = loop {
        let mut got = None;
        let once = || {
            let (received, room) = read(&mut |bytes| receive_now(stream, bytes, from()))?;
            let plain = received.fds.is_empty() && !received.fds_lost;
            let left_nothing = plain && (1..room).contains(&received.bytes);
            got = Some(received);
            // This error is for the runtime: the next read waits.
            if left_nothing { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
        };
        let outcome = stream.inner().try_io(Interest::READABLE, once);
        match (got, outcome) {
            (Some(received), _) => break received,
            (None, Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                stream.inner().readable().await?
            }
            (None, Err(error)) => return Err(error.into()),
            (None, Ok(())) => {}
        }
    };
    if received.fds_lost && received.fds.len() >= usize::from(FDS_MAX) {
        return Err(ReceiveError::DescriptorsCutOff);
    }
    Ok(received)
}

/// One `recvmsg`. Descriptors are close-on-exec from the start.
fn receive_now(stream: &Stream, bytes: &mut [u8], from: Option<u32>) -> io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX as usize))];
    let room = if from.is_some() { &mut space[..] } else { &mut [] };
    let mut ancillary = RecvAncillaryBuffer::new(room);
    let mut slices = [IoSliceMut::new(bytes)];
    let received =
        rustix::net::recvmsg(stream.as_fd(), &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let (RecvAncillaryMessage::ScmRights(rights), Some(uid)) = (message, from) {
            fds.extend(rights.map(|fd| ReceivedFd::of(fd, uid)));
        }
    }
    // The kernel sets CTRUNC when descriptors did not fit the buffer, or did not fit the process's descriptor table. In
    // the second case the buffer is not full.
    Ok(Received { bytes: received.bytes, fds, fds_lost: received.flags.contains(ReturnFlags::CTRUNC) })
}
