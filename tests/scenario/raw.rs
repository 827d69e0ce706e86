//! A client that sends the bytes that a test gives it, valid or not.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use rocmforge_client::wire::{
    self, ClientHello, Flags, FrameHeader, HEADER_BYTES, Message, Op, PAYLOAD_BYTES_MAX, SERVER_HELLO_BYTES,
    ServerHello, WireError,
};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::rig::{PATIENCE, Rig};

pub struct Raw(pub UnixStream);

impl Raw {
    /// Connected, with nothing sent.
    pub fn silent(rig: &Rig) -> Self {
        let stream = UnixStream::connect(rig.socket()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(stream)
    }

    /// Connected, with hellos exchanged.
    pub fn connect(rig: &Rig) -> Self {
        Self::connect_as(rig, &ClientHello::new("raw"))
    }

    /// Connected with this hello.
    pub fn connect_as(rig: &Rig, hello: &ClientHello) -> Self {
        let mut raw = Self::silent(rig);
        raw.write(&hello.to_bytes().unwrap());
        assert_eq!(raw.hello().status, 0);
        raw
    }

    pub fn hello(&mut self) -> ServerHello {
        let mut bytes = [0; SERVER_HELLO_BYTES];
        self.0.read_exact(&mut bytes).unwrap();
        ServerHello::parse(&bytes).unwrap()
    }

    pub fn write(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    pub fn send<T: Message>(&mut self, stream: u32, op: Op, message: &T) {
        let frame = wire::encode_frame(stream, op, Flags::NONE, PAYLOAD_BYTES_MAX, message).unwrap();
        self.write(&frame);
    }

    pub fn ping(&mut self, stream: u32) {
        self.send(stream, Op::Ping, &wire::PingRequest::default());
    }

    pub fn receive(&mut self) -> (FrameHeader, Vec<u8>) {
        let mut header = [0; HEADER_BYTES];
        self.0.read_exact(&mut header).unwrap();
        let header = FrameHeader::parse(&header, PAYLOAD_BYTES_MAX).unwrap();
        let mut payload = vec![0; header.len as usize];
        self.0.read_exact(&mut payload).unwrap();
        (header, payload)
    }

    /// The next frame, which must be an error; returns its stream and the error.
    #[track_caller]
    pub fn error(&mut self) -> (u32, WireError) {
        let (header, payload) = self.receive();
        assert_eq!(header.known_op(), Some(Op::Error), "{header:?}");
        (header.stream, wire::decode(&payload).unwrap())
    }

    /// Checks that the daemon closes the connection and sends nothing more.
    #[track_caller]
    pub fn assert_closed(mut self) {
        let mut rest = Vec::new();
        match self.0.read_to_end(&mut rest) {
            Ok(_) => assert_eq!(rest, [0; 0]),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}"),
        }
    }

    /// Sends bytes with descriptors attached to the first byte.
    pub fn send_with(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
        let sent =
            rustix::net::sendmsg(self.0.as_fd(), &[IoSlice::new(bytes)], &mut ancillary, SendFlags::empty())
                .unwrap();
        assert_eq!(sent, bytes.len());
    }
}

/// A header of these numbers, valid or not.
pub fn header(len: u32, stream: u32, op: u16, flags: u8, n_fds: u8) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(len.to_le_bytes());
    bytes.extend(stream.to_le_bytes());
    bytes.extend(op.to_le_bytes());
    bytes.extend([flags, n_fds]);
    bytes.extend(0u32.to_le_bytes());
    bytes
}
