//! A socket with deadlines: cuts the interprocess stream into whole frames, and sends descriptors with a frame's
//! first byte.

use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use interprocess::os::unix::uds_local_socket::Stream;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::error::ProtocolError;
use crate::wire::{FDS_MAX, FrameHeader, HEADER_BYTES};

/// Bytes of one read: many frames of one token each, or a good part of a large frame.
const READ_BYTES: usize = 16 * 1024;

/// A frame from the server.
#[derive(Debug)]
pub(crate) struct Frame {
    pub header: FrameHeader,
    pub payload: Vec<u8>,
}

/// Why no frame was read.
#[derive(Debug)]
pub(crate) enum ReadError {
    Io(io::Error),
    Protocol(ProtocolError),
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl<E: Into<ProtocolError>> From<E> for ReadError {
    fn from(error: E) -> Self {
        Self::Protocol(error.into())
    }
}

/// A nonblocking stream; every wait has a deadline. Reading and writing are independent of each other.
#[derive(Debug)]
pub(crate) struct Transport(Stream);

impl Transport {
    /// Takes a stream that is already nonblocking.
    pub fn new(stream: Stream) -> Self {
        Self(stream)
    }

    /// The stream.
    pub fn stream(&self) -> &Stream {
        &self.0
    }

    /// The stream, for a runtime that waits for it in its own way.
    #[cfg(feature = "tokio")]
    pub fn into_stream(self) -> Stream {
        self.0
    }

    /// True where the other side has closed.
    pub fn is_hung_up(&self) -> bool {
        let mut poll_fd = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::RDHUP)];
        let closed = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        poll(&mut poll_fd, Some(&Timespec::default())).is_ok() && poll_fd[0].revents().intersects(closed)
    }

    /// Fills `bytes`.
    pub fn read_exact(&self, bytes: &mut [u8], deadline: Option<Instant>) -> io::Result<()> {
        let mut filled = 0;
        while filled < bytes.len() {
            match (&self.0).read(&mut bytes[filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(error) => self.wait_after(error, PollFlags::IN, deadline)?,
            }
        }
        Ok(())
    }

    /// Appends the available bytes to `buffer`, at least one.
    fn read_some(&self, buffer: &mut Vec<u8>, deadline: Option<Instant>) -> io::Result<()> {
        let before = buffer.len();
        buffer.resize(before + READ_BYTES, 0);
        let outcome = loop {
            match (&self.0).read(&mut buffer[before..]) {
                Ok(0) => break Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => break Ok(count),
                Err(error) => match self.wait_after(error, PollFlags::IN, deadline) {
                    Ok(()) => {}
                    Err(error) => break Err(error),
                },
            }
        };
        buffer.truncate(before + outcome.as_ref().copied().unwrap_or(0));
        outcome.map(drop)
    }

    /// Writes all of `bytes`, and `fds` with the first byte.
    pub fn write_all(
        &self,
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> io::Result<()> {
        let mut written = 0;
        while written < bytes.len() {
            let outcome = if written == 0 && !fds.is_empty() {
                self.send_with_descriptors(bytes, fds)
            } else {
                (&self.0).write(&bytes[written..])
            };
            match outcome {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => written += count,
                Err(error) => self.wait_after(error, PollFlags::OUT, deadline)?,
            }
        }
        Ok(())
    }

    fn send_with_descriptors(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX as usize))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(sendmsg(self.0.as_fd(), &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
    }

    /// If `error` means that the socket is not ready, waits until it is; otherwise returns the error.
    fn wait_after(&self, error: io::Error, ready: PollFlags, deadline: Option<Instant>) -> io::Result<()> {
        match error.kind() {
            io::ErrorKind::Interrupted => return Ok(()),
            io::ErrorKind::WouldBlock => {}
            _ => return Err(error),
        }
        let timeout = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
            None => None,
            Some(Duration::ZERO) => return Err(io::ErrorKind::TimedOut.into()),
            Some(left) => Some(Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?),
        };
        match poll(&mut [PollFd::from_borrowed_fd(self.0.as_fd(), ready)], timeout.as_ref()) {
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Cuts the server's bytes into frames. Keeps a partial frame when a deadline passes.
#[derive(Debug)]
pub(crate) struct FrameReader {
    buffer: Vec<u8>,
    len_max: u32,
}

impl FrameReader {
    /// Payloads may have up to `len_max` bytes.
    pub fn new(len_max: u32) -> Self {
        Self { buffer: Vec::new(), len_max }
    }

    /// The next frame.
    pub fn read(&mut self, transport: &Transport, deadline: Option<Instant>) -> Result<Frame, ReadError> {
        loop {
            if let Some(frame) = self.cut()? {
                return Ok(frame);
            }
            transport.read_some(&mut self.buffer, deadline)?;
        }
    }

    /// The place for more bytes of the server, with room for a read. Then [`FrameReader::cut`] has the frames.
    #[cfg(feature = "tokio")]
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        self.buffer.reserve(READ_BYTES);
        &mut self.buffer
    }

    /// The first frame of the buffer, if it is whole.
    pub fn cut(&mut self) -> Result<Option<Frame>, ProtocolError> {
        let Some((header, rest)) = self.buffer.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let header = FrameHeader::parse(header, self.len_max)?;
        if header.n_fds != 0 {
            return Err(ProtocolError::Descriptors { n_fds: header.n_fds });
        }
        let Some(payload) = rest.get(..header.len as usize) else { return Ok(None) };
        header.check_payload(payload)?;
        let payload = payload.to_vec();
        self.buffer.drain(..HEADER_BYTES + payload.len());
        Ok(Some(Frame { header, payload }))
    }
}
