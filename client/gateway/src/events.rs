//! Streamed answers: the pieces of a running answer, written as an API's events when the client takes them.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::unfold;
use hyper::Response;
use hyper::body::Frame;
use rocmforge_client::ClientError;

use crate::Gateway;
use crate::failure::Failure;
use crate::generation::{Ended, Piece, Running};
use crate::reply::{Body, streamed};

/// An API's way to write an answer in events. Every function returns whole events, or nothing.
pub trait Events: Send + 'static {
    /// The type of the response.
    const CONTENT_TYPE: &'static str;

    /// The events before the first piece.
    fn begin(&mut self, prompt_tokens: usize) -> String;

    /// The events of a piece.
    fn piece(&mut self, piece: &Piece) -> String;

    /// The last events.
    fn end(&mut self, ended: &Ended) -> String;

    /// The event that ends an answer which failed.
    fn failed(&mut self, failure: &Failure) -> String;
}

/// Counts the stream as open, and holds the state between two pieces. Dropping it cancels the request.
struct Streaming<E> {
    running: Running,
    events: E,
    stage: Stage,
    gateway: Arc<Gateway>,
}

enum Stage {
    Begin,
    Pieces,
    Over,
}

impl<E> Drop for Streaming<E> {
    fn drop(&mut self) {
        self.gateway.metrics.stream_ended();
    }
}

/// The response that streams an answer. Nothing is taken from the daemon before the client has room for it. So a client
/// that reads slowly leaves the daemon without credit, and delays nobody else.
pub fn response<E: Events>(running: Running, events: E) -> Response<Body> {
    let gateway = Arc::clone(running.gateway());
    gateway.metrics.stream();
    let streaming = Streaming { running, events, stage: Stage::Begin, gateway };
    let pieces = unfold(streaming, |mut streaming| async move {
        let text = streaming.next().await?;
        Some((Ok::<_, Infallible>(Frame::data(Bytes::from(text))), streaming))
    });
    streamed(E::CONTENT_TYPE, pieces)
}

impl<E: Events> Streaming<E> {
    /// The next events; `None` after the last ones.
    async fn next(&mut self) -> Option<String> {
        loop {
            let text = match self.stage {
                Stage::Over => return None,
                Stage::Begin => {
                    self.stage = Stage::Pieces;
                    self.events.begin(self.running.prompt_tokens())
                }
                Stage::Pieces => match self.running.next().await {
                    Ok(Some(piece)) => self.events.piece(&piece),
                    Ok(None) => {
                        let ended = self.running.end().await;
                        self.last(ended)
                    }
                    Err(error) => self.last(Err(error)),
                },
            };
            if !text.is_empty() {
                return Some(text);
            }
        }
    }

    fn last(&mut self, ended: Result<Ended, ClientError>) -> String {
        self.stage = Stage::Over;
        match ended {
            Ok(ended) => self.events.end(&ended),
            Err(error) => self.events.failed(&error.into()),
        }
    }
}
