//! The open streams and the unread frames of each. No I/O.
//!
//! A stream's life: open -> ended by its `Reply`, `End` or `Error` -> taken by its owner, gone. If the owner drops it
//! first, the stream is abandoned: its remaining frames are dropped until its end.

use std::collections::{HashMap, VecDeque};

use crate::error::{ClientError, ProtocolError};
use crate::transport::Frame;
use crate::wire::{Op, WireError, decode};

/// Most bytes of frames that wait to be taken, so that a broken daemon cannot fill the memory. Requests that may be open at
/// once are answered with at most 64 frames of 1 MiB, and items, which are small.
const UNREAD_BYTES_MAX: usize = 256 << 20;

/// Bytes counted for a frame beside its payload.
const FRAME_OVERHEAD_BYTES: usize = size_of::<Frame>();

#[derive(Debug, Default)]
struct OpenStream {
    /// Frames not yet taken; at most the granted items and one end.
    frames: VecDeque<Frame>,
    /// Items the server may still send.
    credit: u32,
    /// True if the stream gets items, false if it gets one `Reply`.
    items: bool,
    ended: bool,
    abandoned: bool,
}

/// The streams of one connection.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    streams: HashMap<u32, OpenStream>,
    /// Size of all frames not yet taken.
    unread_bytes: usize,
}

fn size_of_frame(frame: &Frame) -> usize {
    frame.payload.len() + FRAME_OVERHEAD_BYTES
}

impl Inbox {
    /// Number of requests that the server has not ended.
    pub fn open_count(&self) -> usize {
        self.streams.values().filter(|stream| !stream.ended).count()
    }

    /// Opens a stream before its request is sent; `credit` is `None` if one `Reply` is expected.
    pub fn open(&mut self, id: u32, credit: Option<u32>) {
        let stream =
            OpenStream { credit: credit.unwrap_or(0), items: credit.is_some(), ..OpenStream::default() };
        self.streams.insert(id, stream);
    }

    /// Removes a stream whose request could not be sent.
    pub fn forget(&mut self, id: u32) {
        self.streams.remove(&id);
    }

    /// Adds credit to a stream.
    pub fn grant(&mut self, id: u32, items: u32) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.credit = stream.credit.saturating_add(items);
        }
    }

    /// Files a frame; an error on stream 0 ends the connection.
    pub fn accept(&mut self, frame: Frame) -> Result<(), ClientError> {
        if frame.header.stream == 0 && frame.header.known_op() == Some(Op::Error) {
            let error = decode::<WireError>(&frame.payload).map_err(ProtocolError::Payload)?;
            return Err(ClientError::Server(error));
        }
        Ok(self.file(frame)?)
    }

    /// Files a frame under its stream.
    fn file(&mut self, frame: Frame) -> Result<(), ProtocolError> {
        let id = frame.header.stream;
        let op = frame.header.op;
        let stream = self
            .streams
            .get_mut(&id)
            .filter(|stream| !stream.ended)
            .ok_or(ProtocolError::UnknownStream { stream: id })?;
        match frame.header.known_op() {
            Some(Op::Item) if stream.items => {
                stream.credit = stream.credit.checked_sub(1).ok_or(ProtocolError::NoCredit { stream: id })?;
            }
            Some(Op::End) if stream.items => stream.ended = true,
            Some(Op::Reply) if !stream.items => stream.ended = true,
            Some(Op::Error) => stream.ended = true,
            _ => return Err(ProtocolError::UnexpectedOp { stream: id, op }),
        }
        if !stream.abandoned {
            let bytes = self.unread_bytes + size_of_frame(&frame);
            if bytes > UNREAD_BYTES_MAX {
                return Err(ProtocolError::TooMuchUnread { bytes, max: UNREAD_BYTES_MAX });
            }
            self.unread_bytes = bytes;
            stream.frames.push_back(frame);
        } else if stream.ended {
            self.streams.remove(&id);
        }
        Ok(())
    }

    /// The oldest frame of a stream; the stream is gone once its last frame is taken.
    pub fn take(&mut self, id: u32) -> Option<Frame> {
        let stream = self.streams.get_mut(&id)?;
        let frame = stream.frames.pop_front();
        self.unread_bytes -= frame.as_ref().map_or(0, size_of_frame);
        if stream.ended && stream.frames.is_empty() {
            self.streams.remove(&id);
        }
        frame
    }

    /// Whether a frame of the stream can be taken.
    pub fn has(&self, id: u32) -> bool {
        self.streams.get(&id).is_some_and(|stream| !stream.frames.is_empty())
    }

    /// The owner drops the stream. True if the server has yet to end it, so that a cancel is worth sending.
    pub fn abandon(&mut self, id: u32) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        self.unread_bytes -= stream.frames.iter().map(size_of_frame).sum::<usize>();
        if stream.ended {
            self.streams.remove(&id);
            return false;
        }
        stream.frames.clear();
        stream.abandoned = true;
        true
    }

    /// Whether the server has yet to end the stream.
    pub fn is_open(&self, id: u32) -> bool {
        self.streams.get(&id).is_some_and(|stream| !stream.ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Flags, FrameHeader};

    fn frame(stream: u32, op: Op) -> Frame {
        let header =
            FrameHeader { len: 0, stream, op: op as u16, flags: Flags::NONE, n_fds: 0, crc_or_zero: 0 };
        Frame { header, payload: vec![] }
    }

    #[test]
    fn replies_in_any_order_reach_their_streams() {
        let mut inbox = Inbox::default();
        inbox.open(1, None);
        inbox.open(3, Some(2));
        inbox.file(frame(3, Op::Item)).unwrap();
        inbox.file(frame(1, Op::Reply)).unwrap();
        inbox.file(frame(3, Op::End)).unwrap();
        assert_eq!(inbox.open_count(), 0);
        assert_eq!(inbox.take(1).unwrap().header.op, Op::Reply as u16);
        assert!(inbox.take(1).is_none());
        assert_eq!(inbox.take(3).unwrap().header.op, Op::Item as u16);
        assert_eq!(inbox.take(3).unwrap().header.op, Op::End as u16);
        assert!(inbox.streams.is_empty());
    }

    #[test]
    fn an_item_without_credit_breaks_the_protocol() {
        let mut inbox = Inbox::default();
        inbox.open(1, Some(1));
        inbox.file(frame(1, Op::Item)).unwrap();
        assert_eq!(inbox.file(frame(1, Op::Item)), Err(ProtocolError::NoCredit { stream: 1 }));
        inbox.grant(1, 1);
        inbox.file(frame(1, Op::Item)).unwrap();
    }

    #[test]
    fn a_frame_after_the_end_breaks_the_protocol() {
        let mut inbox = Inbox::default();
        inbox.open(1, None);
        inbox.file(frame(1, Op::Reply)).unwrap();
        assert_eq!(inbox.file(frame(1, Op::Reply)), Err(ProtocolError::UnknownStream { stream: 1 }));
        assert_eq!(inbox.file(frame(5, Op::Reply)), Err(ProtocolError::UnknownStream { stream: 5 }));
    }

    #[test]
    fn frames_of_an_abandoned_stream_are_dropped_until_its_end() {
        let mut inbox = Inbox::default();
        inbox.open(1, Some(4));
        inbox.file(frame(1, Op::Item)).unwrap();
        assert!(inbox.abandon(1));
        inbox.file(frame(1, Op::Item)).unwrap();
        assert!(inbox.take(1).is_none());
        inbox.file(frame(1, Op::Error)).unwrap();
        assert!(inbox.streams.is_empty());
    }

    #[test]
    fn unread_frames_have_a_bound_and_taken_ones_make_room() {
        let mut inbox = Inbox::default();
        inbox.open(1, Some(u32::MAX));
        inbox.open(3, Some(u32::MAX));
        let large = |stream| Frame { payload: vec![0; 1 << 20], ..frame(stream, Op::Item) };
        let fill = |inbox: &mut Inbox| loop {
            if let Err(error) = inbox.file(large(3)) {
                return error;
            }
        };
        inbox.file(frame(1, Op::Item)).unwrap();
        assert!(matches!(fill(&mut inbox), ProtocolError::TooMuchUnread { .. }));
        assert!(inbox.unread_bytes <= UNREAD_BYTES_MAX);
        inbox.take(3).unwrap();
        inbox.file(large(3)).unwrap();
        inbox.abandon(3);
        assert_eq!(inbox.unread_bytes, FRAME_OVERHEAD_BYTES, "the item of stream 1");
        inbox.take(1).unwrap();
        assert_eq!(inbox.unread_bytes, 0);
    }

    #[test]
    fn a_reply_to_a_generation_and_an_item_to_a_call_break_the_protocol() {
        let mut inbox = Inbox::default();
        inbox.open(1, None);
        inbox.open(3, Some(9));
        let unexpected = |stream, op: Op| Err(ProtocolError::UnexpectedOp { stream, op: op as u16 });
        assert_eq!(inbox.file(frame(1, Op::Item)), unexpected(1, Op::Item));
        assert_eq!(inbox.file(frame(3, Op::Reply)), unexpected(3, Op::Reply));
        assert_eq!(inbox.file(frame(3, Op::Ping)), unexpected(3, Op::Ping));
    }
}
