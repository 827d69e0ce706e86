//! Bytes and file descriptors of one connection, cut into frames.
//!
//! A `recvmsg` of its own reads each header, exactly 16 bytes. So its descriptors can only belong to its frame: the
//! kernel delivers descriptors with the bytes they were sent with. All other reads have no room for descriptors: the
//! kernel drops a stray one, says so, and it is refused.

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

/// Reads a frame whose payload has at most `payload_bytes_max` bytes. Waits for the first byte without a time limit.
///
/// Charges descriptors and payload to `room`. Waits up to [`FRAME_TIME`] for room before it allocates the payload.
/// Meanwhile it reads nothing, so the client waits too.
///
/// Do not drop this future halfway: the bytes read so far would be lost.
///
/// # Errors
/// [`ReceiveError`]; the connection must end.
pub async fn frame(
    stream: &Stream,
    payload_bytes_max: u32,
    room: &UserBudget,
) -> Result<Frame, ReceiveError> {
    let mut header = [0; HEADER_BYTES];
    let first = receive(stream, &mut header, Some(room.uid())).await?;
    if first.bytes == 0 {
        return Err(ReceiveError::HungUp);
    }
    let Received { bytes, mut fds, fds_lost } = first;
    let read = rest_of_header(stream, &mut header, bytes, payload_bytes_max);
    let header =
        timeout_at(Instant::now() + FRAME_TIME, read).await.map_err(|_| ReceiveError::FrameTimeout)??;
    // The kernel does not report how many descriptors it dropped, only that some arrived and did not fit.
    match (fds_lost, header.n_fds) {
        (true, 0) => return Err(ReceiveError::DescriptorsCutOff),
        (true, _) => {}
        (false, announced) => expect_descriptors(&fds, announced)?,
    }
    let (descriptors, fds_refused) = match room.descriptors(fds.len()) {
        Ok(charge) => (charge, None),
        Err(refusal) => {
            fds.clear();
            (None, Some(refusal))
        }
    };
    let len = header.len;
    let charged = room.payload(len, FRAME_TIME).await;
    let charge = charged.map_err(|refusal| ReceiveError::NoRoom { len, refusal })?;
    let read = payload(stream, len as usize);
    let payload =
        timeout_at(Instant::now() + FRAME_TIME, read).await.map_err(|_| ReceiveError::FrameTimeout)??;
    header.check_payload(&payload)?;
    let held = Held { payload: charge, descriptors, open: None };
    Ok(Frame { header, payload, fds, fds_lost, fds_refused, held })
}

/// Reads what is missing of a header.
async fn rest_of_header(
    stream: &Stream,
    header: &mut [u8; HEADER_BYTES],
    have: usize,
    payload_bytes_max: u32,
) -> Result<FrameHeader, ReceiveError> {
    let (_, unread) = header.split_at_mut(have);
    fill(stream, unread, false).await?;
    Ok(FrameHeader::parse(header, payload_bytes_max)?)
}

/// Allocates the payload as it arrives, so that a header alone costs no memory.
async fn payload(stream: &Stream, len: usize) -> Result<Vec<u8>, ReceiveError> {
    let mut payload = Vec::new();
    while payload.len() < len {
        let have = payload.len();
        let more = (len - have).min(AHEAD_BYTES);
        payload.reserve_exact(more);
        payload.resize(have + more, 0);
        fill(stream, &mut payload[have..], false).await?;
    }
    Ok(payload)
}

fn expect_descriptors(fds: &[ReceivedFd], announced: u8) -> Result<(), ReceiveError> {
    if fds.len() == usize::from(announced) {
        return Ok(());
    }
    Err(ReceiveError::Descriptors { got: fds.len(), announced })
}

/// Fills `bytes`, which come without descriptors.
async fn fill(stream: &Stream, bytes: &mut [u8], may_be_empty: bool) -> Result<(), ReceiveError> {
    let want = bytes.len();
    let mut have = 0;
    while have < want {
        let received = receive(stream, &mut bytes[have..], None).await?;
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

/// One `recvmsg`, with room for descriptors `from` a user unless it may send none now. They are close-on-exec from the
/// start.
async fn receive(stream: &Stream, bytes: &mut [u8], from: Option<u32>) -> Result<Received, ReceiveError> {
    let from = from.filter(|uid| ReceivedFd::may_come_from(*uid));
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX as usize))];
    let mut fds = Vec::new();
    let (bytes, flags) = stream
        .inner()
        .async_io(Interest::READABLE, || {
            let room = if from.is_some() { &mut space[..] } else { &mut [] };
            let mut ancillary = RecvAncillaryBuffer::new(room);
            let mut slices = [IoSliceMut::new(bytes)];
            let received =
                rustix::net::recvmsg(stream.as_fd(), &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
            for message in ancillary.drain() {
                if let (RecvAncillaryMessage::ScmRights(rights), Some(uid)) = (message, from) {
                    fds.extend(rights.map(|fd| ReceivedFd::of(fd, uid)));
                }
            }
            Ok((received.bytes, received.flags))
        })
        .await?;
    // The kernel sets CTRUNC when descriptors did not fit the buffer, or did not fit the process's descriptor table. In
    // the second case the buffer is not full.
    let cut_off = flags.contains(ReturnFlags::CTRUNC);
    if cut_off && fds.len() >= usize::from(FDS_MAX) {
        return Err(ReceiveError::DescriptorsCutOff);
    }
    Ok(Received { bytes, fds, fds_lost: cut_off })
}
