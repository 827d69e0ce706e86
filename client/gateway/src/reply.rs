//! The gateway's HTTP responses.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::Stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, SizeHint};
use hyper::header::{CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use serde_json::Value;

use crate::api::Api;
use crate::failure::Failure;

/// The body of a response.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// The type of JSON bodies.
const JSON: &str = "application/json";

/// A whole answer in JSON.
pub fn json(value: &Value) -> Response<Body> {
    whole(200, JSON, value.to_string())
}

/// A whole answer as text.
pub fn text(content_type: &'static str, text: String) -> Response<Body> {
    whole(200, content_type, text)
}

/// An answer in pieces, as they come.
pub fn streamed(
    content_type: &'static str,
    pieces: impl Stream<Item = Result<Frame<Bytes>, Infallible>> + Send + 'static,
) -> Response<Body> {
    let mut response = Response::new(BodyExt::boxed_unsync(StreamBody::new(pieces)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// A failure in the form of its API. `close` ends the connection, whose further bytes cannot be trusted.
pub fn failed(failure: &Failure, api: Api, close: bool) -> Response<Body> {
    let mut response = whole(failure.status, JSON, failure.body(api).to_string());
    if let Some(seconds) = failure.retry_after_s {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    if close { ending_connection(response) } else { response }
}

/// The same response, after which the connection ends.
pub fn ending_connection(mut response: Response<Body>) -> Response<Body> {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// The same response, whose body holds a value until it is written or dropped.
pub fn holding(response: Response<Body>, held: impl Send + Unpin + 'static) -> Response<Body> {
    response.map(|body| BodyExt::boxed_unsync(Holding { body, _held: held }))
}

/// A body with a value. It tells its size as the body does, so that whole answers keep their length.
struct Holding<T> {
    body: Body,
    _held: T,
}

impl<T: Unpin> hyper::body::Body for Holding<T> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

fn whole(status: u16, content_type: &'static str, text: String) -> Response<Body> {
    let mut response = Response::new(BodyExt::boxed_unsync(Full::new(Bytes::from(text))));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
