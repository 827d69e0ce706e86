//! Bytes and file descriptors of one connection, cut into frames.
//!
//! A `recvmsg` of its own reads each header, exactly 16 bytes. So its descriptors can only belong to its frame: the
//! kernel delivers descriptors with the bytes they were sent with. Every read has room for descriptors, so that a stray
//! one is seen, closed and refused instead of lost.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use interprocess::os::unix::uds_local_socket::tokio::Stream;
use rocmforge_client::wire::{
    CLIENT_HELLO_BYTES, ErrorCode, FDS_MAX, FrameHeader, HEADER_BYTES, HeaderError, MAGIC,
};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use tokio::io::Interest;
use tokio::time::{Instant, timeout_at};

use crate::session::Frame;

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
            expect_descriptors(&fill(stream, byte, n == 0).await?, 0)?;
            if *byte != [expected] {
                return Err(ReceiveError::NotProtocol);
            }
        }
        expect_descriptors(&fill(stream, rest, false).await?, 0)
    };
    let deadline = Instant::now() + HELLO_TIME;
    timeout_at(deadline, read).await.map_err(|_| ReceiveError::HelloTimeout)??;
    Ok(bytes)
}

/// Reads a frame whose payload has at most `payload_bytes_max` bytes. Waits for the first byte without a time limit.
///
/// Do not drop this future halfway: the bytes read so far would be lost.
///
/// # Errors
/// [`ReceiveError`]; the connection must end.
pub async fn frame(stream: &Stream, payload_bytes_max: u32) -> Result<Frame, ReceiveError> {
    let mut header = [0; HEADER_BYTES];
    let first = receive(stream, &mut header).await?;
    if first.bytes == 0 {
        return Err(ReceiveError::HungUp);
    }
    let rest = async move {
        let (_, unread) = header.split_at_mut(first.bytes);
        expect_descriptors(&fill(stream, unread, false).await?, 0)?;
        let header = FrameHeader::parse(&header, payload_bytes_max)?;
        // The kernel does not report how many descriptors it dropped, only that some arrived and did not fit.
        match (first.fds_lost, header.n_fds) {
            (true, 0) => return Err(ReceiveError::DescriptorsCutOff),
            (true, _) => {}
            (false, announced) => expect_descriptors(&first.fds, announced)?,
        }
        let payload = payload(stream, header.len as usize).await?;
        header.check_payload(&payload)?;
        Ok(Frame { header, payload, fds: first.fds, fds_lost: first.fds_lost })
    };
    let deadline = Instant::now() + FRAME_TIME;
    timeout_at(deadline, rest).await.map_err(|_| ReceiveError::FrameTimeout)?
}

/// Allocates the payload as it arrives, so that a header alone costs no memory.
async fn payload(stream: &Stream, len: usize) -> Result<Vec<u8>, ReceiveError> {
    let mut payload = Vec::new();
    while payload.len() < len {
        let have = payload.len();
        let more = (len - have).min(AHEAD_BYTES);
        payload.reserve_exact(more);
        payload.resize(have + more, 0);
        expect_descriptors(&fill(stream, &mut payload[have..], false).await?, 0)?;
    }
    Ok(payload)
}

fn expect_descriptors(fds: &[OwnedFd], announced: u8) -> Result<(), ReceiveError> {
    if fds.len() == usize::from(announced) {
        return Ok(());
    }
    Err(ReceiveError::Descriptors { got: fds.len(), announced })
}

/// Fills `bytes`; returns all descriptors that arrived with them.
async fn fill(stream: &Stream, bytes: &mut [u8], may_be_empty: bool) -> Result<Vec<OwnedFd>, ReceiveError> {
    let want = bytes.len();
    let mut have = 0;
    let mut fds = Vec::new();
    while have < want {
        let mut received = receive(stream, &mut bytes[have..]).await?;
        match received.bytes {
            0 if have == 0 && may_be_empty => return Err(ReceiveError::HungUp),
            0 => return Err(ReceiveError::CutShort { have, want }),
            bytes => have += bytes,
        }
        fds.append(&mut received.fds);
        // Lost or not, descriptors do not belong here.
        if received.fds_lost || fds.len() > usize::from(FDS_MAX) {
            return Err(ReceiveError::DescriptorsCutOff);
        }
    }
    Ok(fds)
}

struct Received {
    bytes: usize,
    fds: Vec<OwnedFd>,
    /// The process had no free descriptors for all that arrived.
    fds_lost: bool,
}

/// One `recvmsg`. Descriptors are close-on-exec from the start.
async fn receive(stream: &Stream, bytes: &mut [u8]) -> Result<Received, ReceiveError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX as usize))];
    let mut fds = Vec::new();
    let (bytes, flags) = stream
        .inner()
        .async_io(Interest::READABLE, || {
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut slices = [IoSliceMut::new(bytes)];
            let received =
                rustix::net::recvmsg(stream.as_fd(), &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
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
