//! Anthropic's API: messages.

mod request;
mod response;

use std::sync::Arc;
use std::time::Instant;

use hyper::Response;
use serde_json::json;

use crate::Gateway;
use crate::events;
use crate::failure::Failure;
use crate::generation::Running;
use crate::params::Params;
use crate::reply::{Body, json};

/// `POST /v1/messages`
///
/// # Errors
/// Status 400 with the field at fault; errors of the daemon.
pub async fn messages(
    gateway: &Arc<Gateway>,
    params: Params,
    since: Instant,
) -> Result<Response<Body>, Failure> {
    let asked = request::Asked::of_message(params)?;
    let message = response::Message::new(asked.model.clone());
    let stream = asked.stream;
    let mut running = Running::start(gateway, asked.wanted(gateway).await?, since).await?;
    if stream {
        return Ok(events::response(running, message));
    }
    let (piece, ended) = running.whole().await?;
    Ok(json(&message.whole(&piece, &ended)))
}

/// `POST /v1/messages/count_tokens`: the daemon renders and tokenizes the messages as it would for an answer. It also
/// computes them, which the next request for the same messages then need not do.
///
/// # Errors
/// As [`messages`].
pub async fn count_tokens(
    gateway: &Arc<Gateway>,
    params: Params,
    since: Instant,
) -> Result<Response<Body>, Failure> {
    let asked = request::Asked::of_count(params)?;
    let running = Running::start(gateway, asked.wanted(gateway).await?, since).await?;
    Ok(json(&json!({"input_tokens": running.prompt_tokens()})))
}
