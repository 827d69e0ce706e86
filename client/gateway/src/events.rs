//! Streamed answers: the pieces of a running answer, written as an API's events when the client takes them.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{StreamExt, select_all, unfold};
use hyper::Response;
use hyper::body::Frame;

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

    /// The last events of an answer.
    fn end(&mut self, ended: &Ended) -> String;

    /// The events after the last answer of several to one request.
    fn after_all(&mut self, _all: &[Ended]) -> String {
        String::new()
    }

    /// The event that ends an answer which failed.
    fn failed(&mut self, failure: &Failure) -> String;
}

/// Counts the stream as open until it is dropped.
struct Open(Arc<Gateway>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.metrics.stream_ended();
    }
}

/// The state of an answer between two pieces. Dropping it cancels the request.
struct Streaming<E> {
    running: Running,
    events: E,
    stage: Stage,
}

enum Stage {
    Begin,
    Pieces,
}

/// Events of one of the answers.
enum Told<E> {
    Events(String),
    /// It ended with these, and its state may write the last events of all.
    Ended(String, Ended, E),
    /// It failed with these: the others end too.
    Failed(String),
}

/// The response that streams an answer. Nothing is taken from the daemon before the client has room for it. So a client
/// that reads slowly leaves the daemon without credit, and delays nobody else.
pub fn response<E: Events>(running: Running, events: E) -> Response<Body> {
    responses(vec![(running, events)])
}

/// The response that streams several answers to one request, each piece as it comes.
pub fn responses<E: Events>(answers: Vec<(Running, E)>) -> Response<Body> {
    let open = answers.first().map(|(running, _)| {
        let gateway = Arc::clone(running.gateway());
        gateway.metrics.stream();
        Open(gateway)
    });
    let count = answers.len();
    let all = select_all(answers.into_iter().map(|(running, events)| {
        let streaming = Streaming { running, events, stage: Stage::Begin };
        unfold(Some(streaming), |streaming| async move { streaming?.next().await }).boxed()
    }));
    let texts =
        unfold((all, Vec::with_capacity(count), open), move |(mut all, mut ended, open)| async move {
            let text = match all.next().await? {
                Told::Events(text) => text,
                Told::Ended(text, end, mut events) => {
                    ended.push(end);
                    if ended.len() < count { text } else { text + &events.after_all(&ended) }
                }
                Told::Failed(text) => {
                    all.clear();
                    text
                }
            };
            Some((Ok::<_, Infallible>(Frame::data(Bytes::from(text))), (all, ended, open)))
        });
    streamed(E::CONTENT_TYPE, texts)
}

impl<E: Events> Streaming<E> {
    /// The next events, and the state after them: none after the last ones.
    async fn next(mut self) -> Option<(Told<E>, Option<Self>)> {
        loop {
            let text = match self.stage {
                Stage::Begin => {
                    self.stage = Stage::Pieces;
                    self.events.begin(self.running.prompt_tokens())
                }
                Stage::Pieces => {
                    let ended = match self.running.next().await {
                        Ok(Some(piece)) => Ok(self.events.piece(&piece)),
                        Ok(None) => Err(self.running.end().await),
                        Err(error) => Err(Err(error)),
                    };
                    match ended {
                        Ok(text) => text,
                        Err(Ok(ended)) => {
                            let text = self.events.end(&ended);
                            return Some((Told::Ended(text, ended, self.events), None));
                        }
                        Err(Err(error)) => {
                            let text = self.events.failed(&error.into());
                            return Some((Told::Failed(text), None));
                        }
                    }
                }
            };
            if !text.is_empty() {
                return Some((Told::Events(text), Some(self)));
            }
        }
    }
}
