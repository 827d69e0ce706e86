//! The frames that answer one stream.

use std::sync::Arc;

use rocmforge_client::wire::{self, ErrorCode, Flags, Message, Op, WireError};

use super::Connection;
use super::error::{Failure, of_codec};

/// Answers one stream, once: dropping it unanswered tells the client of a fault, so that no stream stays open.
#[derive(Debug)]
pub(super) struct Answer {
    connection: Arc<Connection>,
    stream: u32,
    ended: bool,
}

impl Answer {
    pub(super) fn new(connection: Arc<Connection>, stream: u32) -> Self {
        Self { connection, stream, ended: false }
    }

    /// One of several; the stream goes on.
    ///
    /// # Errors
    /// A message that does not fit a frame.
    pub(super) fn item<T: Message>(&self, message: &T) -> Result<(), Failure> {
        let frame = self.frame(Op::Item, Flags::MORE, message)?;
        self.connection.outbox.send(frame);
        Ok(())
    }

    /// The whole answer.
    pub(super) fn reply<T: Message>(self, message: &T) {
        self.finish(Op::Reply, message);
    }

    /// The end after items.
    pub(super) fn end<T: Message>(self, message: &T) {
        self.finish(Op::End, message);
    }

    /// The failure of the request.
    pub(super) fn fail(self, error: Failure) {
        if error.code >= ErrorCode::DeviceFailed as u16 {
            tracing::warn!(
                uid = self.connection.peer.uid,
                code = error.code,
                message = error.message,
                "a request failed"
            );
        }
        self.finish(Op::Error, &error);
    }

    fn finish<T: Message>(mut self, op: Op, message: &T) {
        self.finish_by_ref(op, message);
    }

    fn finish_by_ref<T: Message>(&mut self, op: Op, message: &T) {
        self.ended = true;
        let frame = match self.frame(op, Flags::NONE, message) {
            Ok(frame) => frame,
            Err(error) => match self.frame(Op::Error, Flags::NONE, &error) {
                Ok(frame) => frame,
                Err(error) => {
                    tracing::error!(message = error.message, "an error could not be encoded");
                    return;
                }
            },
        };
        // First out of the table: a client that has seen the end may open the next stream at once.
        self.connection.streams.lock().remove(&self.stream);
        self.connection.outbox.send(frame);
    }

    fn frame<T: Message>(&self, op: Op, flags: Flags, message: &T) -> Result<Vec<u8>, Failure> {
        let flags = flags.with(self.connection.flags);
        wire::encode_frame(self.stream, op, flags, self.connection.limits.max_frame, message)
            .map_err(|e| of_codec(&e))
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.ended {
            let error = WireError::new(
                ErrorCode::Internal,
                "a fault of the daemon ended this request without an answer",
            );
            self.finish_by_ref(Op::Error, &error);
        }
    }
}
