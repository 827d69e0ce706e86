//! The frames that answer one stream.

use std::sync::Arc;

use rocmforge_client::wire::{self, ErrorCode, Flags, Message, Op, WireError};

use super::Connection;
use super::error::{Failure, of_codec, of_unread};

/// Answers one stream exactly once. Dropping it unanswered sends an `Internal` error, so that no stream stays open.
#[derive(Debug)]
pub(super) struct Responder {
    connection: Arc<Connection>,
    stream: u32,
    ended: bool,
}

impl Responder {
    pub(super) fn new(connection: Arc<Connection>, stream: u32) -> Self {
        Self { connection, stream, ended: false }
    }

    /// Sends the first of several items, which may be large: waits for room.
    ///
    /// # Errors
    /// A message that does not fit a frame, or for which the user's unread answers leave no room.
    pub(super) async fn first_item<T: Message>(&self, message: &T) -> Result<(), Failure> {
        let frame = self.frame(Op::Item, Flags::MORE, message)?;
        let sent = self.connection.outbox.send_in_turn(frame, || ()).await;
        sent.map_err(|refusal| of_unread(&refusal))
    }

    /// Sends one of several items; the stream goes on.
    ///
    /// # Errors
    /// A message that does not fit a frame.
    pub(super) fn item<T: Message>(&self, message: &T) -> Result<(), Failure> {
        let frame = self.frame(Op::Item, Flags::MORE, message)?;
        self.connection.outbox.send(frame);
        Ok(())
    }

    /// Ends the stream with `result`, once there is room for it.
    pub(super) async fn in_turn<T: Message>(mut self, op: Op, result: Result<T, Failure>) {
        let frame = match result {
            Ok(message) => self.last_frame(op, &message),
            Err(error) => self.last_frame(Op::Error, self.logged(&error)),
        };
        if let Some(frame) = frame {
            let outbox = self.connection.outbox.clone();
            if let Err(refusal) = outbox.send_in_turn(frame, || self.close()).await {
                self.fail(&of_unread(&refusal));
            }
        }
    }

    /// Sends the whole answer at once: for small answers, from code that may not wait.
    pub(super) fn reply<T: Message>(self, message: &T) {
        self.finish(Op::Reply, message);
    }

    /// Sends the request's failure at once.
    pub(super) fn fail(self, error: &Failure) {
        let error = self.logged(error);
        self.finish(Op::Error, error);
    }

    /// Sends the failure that the request asked for, at once. Nothing failed, so nothing is logged.
    pub(super) fn fail_as_asked(self, error: &Failure) {
        self.finish(Op::Error, error);
    }

    fn logged<'a>(&self, error: &'a Failure) -> &'a Failure {
        if error.code >= ErrorCode::DeviceFailed as u16 {
            tracing::warn!(
                name: "failed",
                uid = self.connection.peer.uid,
                code = error.code,
                message = error.message,
                "a request failed"
            );
        }
        error
    }

    fn finish<T: Message>(mut self, op: Op, message: &T) {
        self.finish_by_ref(op, message);
    }

    fn finish_by_ref<T: Message>(&mut self, op: Op, message: &T) {
        if let Some(frame) = self.last_frame(op, message) {
            self.close();
            self.connection.outbox.send(frame);
        }
    }

    /// Frees the stream's number. Call it before sending the last frame: a client that has seen the end may open the
    /// next stream at once.
    fn close(&mut self) {
        self.ended = true;
        self.connection.streams.lock().remove(&self.stream);
    }

    /// The frame that ends the stream: `message`, or the reason why that cannot be encoded.
    fn last_frame<T: Message>(&self, op: Op, message: &T) -> Option<Vec<u8>> {
        let frame = self.frame(op, Flags::NONE, message);
        let frame = frame.or_else(|error| self.frame(Op::Error, Flags::NONE, &error));
        if let Err(error) = &frame {
            tracing::error!(message = error.message, "encoding an error frame failed");
        }
        frame.ok()
    }

    fn frame<T: Message>(&self, op: Op, flags: Flags, message: &T) -> Result<Vec<u8>, Failure> {
        let flags = flags.with(self.connection.flags);
        wire::encode_frame(self.stream, op, flags, self.connection.limits.max_frame, message)
            .map_err(|e| of_codec(&e))
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if !self.ended {
            let error = WireError::new(
                ErrorCode::Internal,
                "a bug in the daemon ended this request without an answer; see the daemon's log",
            );
            self.finish_by_ref(Op::Error, &error);
        }
    }
}
