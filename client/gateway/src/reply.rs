//! The gateway's HTTP responses.

use std::convert::Infallible;

use bytes::Bytes;
use futures_util::Stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
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
    if close {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

fn whole(status: u16, content_type: &'static str, text: String) -> Response<Body> {
    let mut response = Response::new(BodyExt::boxed_unsync(Full::new(Bytes::from(text))));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
