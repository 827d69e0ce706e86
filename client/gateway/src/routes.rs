//! From a request to its response: access, body, path.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body as _, Incoming};
use hyper::header::{EXPECT, TRANSFER_ENCODING};
use hyper::{HeaderMap, Method, Request, Response};
use serde_json::json;
use tokio::sync::OwnedSemaphorePermit;

use crate::access::{Access, Identity};
use crate::api::{Api, whole};
use crate::ending::stopping;
use crate::failure::Failure;
use crate::life::{self, Life};
use crate::params::Params;
use crate::reply::{self, Body};
use crate::{Gateway, anthropic, host, ollama, openai, rerank};

/// Time for a request's body.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// Largest body that waits for no room: every connection may have one.
const SMALL_BODY_BYTES: u64 = 64 * 1024;

/// Path of the responses that are kept.
const RESPONSES: &str = "/v1/responses/";

/// Path of the counters.
const METRICS: &str = "/metrics";

/// The type of Prometheus's text format.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A refusal, and whether the connection's further bytes cannot be trusted.
struct Refused {
    failure: Failure,
    close: bool,
}

/// A body, and the room that it takes.
type Whole = (Bytes, Option<OwnedSemaphorePermit>);

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Self {
        Self { failure, close: false }
    }
}

/// Answers a request, and counts it. It never does for a connection that is about to end.
pub async fn answer(
    gateway: Arc<Gateway>,
    access: Access,
    life: Arc<Life>,
    request: Request<Incoming>,
) -> Response<Body> {
    let Some(counted) = life.request() else { return std::future::pending().await };
    let (since, runs) = (Instant::now(), gateway.ending.runs());
    let api = Api::of(&whole(request.uri().path()));
    // The HTTP library drops a length beside this header, so nobody can tell whether a proxy before took that length.
    let doubtful = request.headers().contains_key(TRANSFER_ENCODING);
    let mut response = match respond(&gateway, &access, &counted, request, since).await {
        Ok(response) => response,
        Err(Refused { failure, close }) => reply::failed(&failure, api, close),
    };
    if doubtful || gateway.ending.has_begun() {
        response = reply::ending_connection(response);
    }
    gateway.metrics.answered(api, response.status().as_u16());
    reply::holding(response, (runs, counted))
}

async fn respond(
    gateway: &Arc<Gateway>,
    access: &Access,
    counted: &life::Request,
    request: Request<Incoming>,
    since: Instant,
) -> Result<Response<Body>, Refused> {
    let (head, body) = request.into_parts();
    let path = &*whole(head.uri.path());
    // A body that is refused unread would pass for the next request.
    let closing = |failure| Refused { failure, close: true };
    host::check(&head).map_err(closing)?;
    let authority = head.uri.authority().map(|authority| authority.as_str());
    let has_body = !body.is_end_stream();
    if matches!(head.method, Method::GET | Method::HEAD) && !has_body && is_open(gateway, path) {
        access.check_place(&head.headers, authority).map_err(closing)?;
        return Ok(open(gateway, path).await?);
    }
    let caller = access.check(&head.headers, authority).map_err(closing)?;
    counted.of(access, caller).map_err(closing)?;
    // Called when the body is read: a connection that ends before may reach a router as a reset, without the refusal.
    let refuse_at_the_end = || if gateway.ending.is_refusing() { Err(stopping()) } else { Ok(()) };
    check_encoding(&head.headers).map_err(closing)?;
    if head.headers.contains_key(EXPECT) && body.size_hint().lower() > gateway.body_bytes_max() {
        return Err(closing(too_large(gateway)));
    }
    if let Some(refusal) = ollama::refusal(path) {
        return Err(closing(refusal));
    }
    match &head.method {
        &Method::GET | &Method::HEAD | &Method::DELETE if has_body => {
            Err(closing(Failure::invalid(format!("a {} request has no body here", head.method))))
        }
        &Method::GET | &Method::HEAD => {
            // Counters are of use to the end.
            if path != METRICS {
                refuse_at_the_end()?;
            }
            let query = head.uri.query().unwrap_or_default();
            Ok(get(gateway, access, caller, path, query).await?)
        }
        &Method::DELETE => match path.strip_prefix(RESPONSES) {
            Some(name) => {
                refuse_at_the_end()?;
                Ok(openai::forget(gateway, caller, name)?)
            }
            None => Err(closing(Failure::new(405, "only responses are deleted here"))),
        },
        &Method::POST => {
            let Some(post) = Post::of(path) else { return Err(closing(not_found(path))) };
            let Some(body) = counted.body(read(gateway, body)).await else {
                return std::future::pending().await;
            };
            let (bytes, room) = body?;
            refuse_at_the_end()?;
            let mut params = Params::read(&bytes)?.holding(room);
            let gateway = gateway.of(access, caller).await?;
            gateway.settings.aliases.apply(&gateway, &mut params).await?;
            Ok(post.run(&gateway, caller, params, since).await?)
        }
        _ => Err(closing(Failure::new(405, "only GET, POST and DELETE requests are served"))),
    }
}

/// Accepts a body in chunks, and no other coding.
fn check_encoding(headers: &HeaderMap) -> Result<(), Failure> {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(()),
        (Some(coding), None) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => Ok(()),
        _ => Err(Failure::new(501, "Transfer-Encoding: only \"chunked\" is taken")),
    }
}

/// Reads a whole body, once there is room for it.
async fn read(gateway: &Gateway, body: Incoming) -> Result<Whole, Refused> {
    let closing = |failure| Refused { failure, close: true };
    match body.size_hint().exact() {
        Some(size) => {
            let room = room(gateway, size).await.map_err(closing)?;
            Ok((read_sized(gateway, body).await?, room))
        }
        None => read_chunked(gateway, body).await,
    }
}

/// Reads a body whose size is not told. It waits for the room of the largest one when it is no longer small.
async fn read_chunked(gateway: &Gateway, mut body: Incoming) -> Result<Whole, Refused> {
    let closing = |failure| Refused { failure, close: true };
    let (max, until) = (gateway.settings.body_bytes, tokio::time::Instant::now() + BODY_TIMEOUT);
    let (mut bytes, mut permit) = (Vec::new(), None);
    loop {
        let frame = match tokio::time::timeout_at(until, body.frame()).await {
            Err(_) => return Err(closing(Failure::new(408, "the body did not arrive in time"))),
            Ok(None) => return Ok((bytes.into(), permit)),
            Ok(Some(Err(error))) => {
                return Err(closing(Failure::invalid(format!("the body cannot be read: {error}"))));
            }
            Ok(Some(Ok(frame))) => frame,
        };
        // Trailers say nothing that the gateway reads.
        let Ok(data) = frame.into_data() else { continue };
        let size = bytes.len().saturating_add(data.len());
        if size > max {
            return Err(closing(too_large(gateway)));
        }
        if permit.is_none() && size as u64 > SMALL_BODY_BYTES {
            permit = room(gateway, gateway.body_bytes_max()).await.map_err(closing)?;
        }
        bytes.extend_from_slice(&data);
    }
}

/// Waits for room for a body's bytes, so that many large ones at once do not fill the memory.
///
/// # Errors
/// Status 413 for more than a body may have, and 503 if there is no room for long.
pub async fn room(gateway: &Gateway, bytes: u64) -> Result<Option<OwnedSemaphorePermit>, Failure> {
    if bytes <= SMALL_BODY_BYTES {
        return Ok(None);
    }
    let Some(kib) = u32::try_from(bytes.div_ceil(1024)).ok().filter(|_| bytes <= gateway.body_bytes_max())
    else {
        return Err(too_large(gateway));
    };
    let _waits = gateway.metrics.waits();
    match tokio::time::timeout(BODY_TIMEOUT, Arc::clone(&gateway.bodies).acquire_many_owned(kib)).await {
        Ok(Ok(permit)) => Ok(Some(permit)),
        _ => {
            let failure =
                Failure::new(503, "other requests' large bodies fill the gateway's memory: try again");
            Err(Failure { retry_after_s: Some(1), ..failure })
        }
    }
}

/// Reads a body whose size is told.
async fn read_sized(gateway: &Gateway, body: Incoming) -> Result<Bytes, Refused> {
    let closing = |failure| Refused { failure, close: true };
    if body.size_hint().lower() > gateway.body_bytes_max() {
        return Err(closing(too_large(gateway)));
    }
    let whole = Limited::new(body, gateway.settings.body_bytes).collect();
    match tokio::time::timeout(BODY_TIMEOUT, whole).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(closing(too_large(gateway))),
        Ok(Err(error)) => Err(closing(Failure::invalid(format!("the body cannot be read: {error}")))),
        Err(_) => Err(closing(Failure::new(408, "the body did not arrive in time"))),
    }
}

fn too_large(gateway: &Gateway) -> Failure {
    let max = gateway.settings.body_bytes >> 20;
    Failure::new(413, format!("the body is larger than {max} MiB; --body-mib of the gateway sets that limit"))
}

fn not_found(path: &str) -> Failure {
    let path: String = path.chars().take(100).collect();
    Failure::new(404, format!("{path} is not served here; `rocmforge-gateway --help` lists the paths"))
}

async fn get(
    gateway: &Arc<Gateway>,
    access: &Access,
    caller: Identity,
    path: &str,
    query: &str,
) -> Result<Response<Body>, Failure> {
    let asks_daemon = path.starts_with("/v1/models") || ["/api/tags", "/api/ps"].contains(&path);
    let gateway = &if asks_daemon { gateway.of(access, caller).await? } else { Arc::clone(gateway) };
    match path {
        "/v1/models" => openai::models(gateway).await,
        "/api/tags" => ollama::tags(gateway).await,
        "/api/ps" => ollama::ps(gateway).await,
        "/api/version" => Ok(ollama::version()),
        METRICS => Ok(metrics(gateway).await),
        "/" => Ok(reply::text("text/plain", "rocmforge-gateway is running\n".to_owned())),
        _ if Post::of(path).is_some() => Err(Failure::new(405, "this path takes POST requests")),
        _ => match (path.strip_prefix("/v1/models/"), path.strip_prefix(RESPONSES)) {
            (Some(name), _) => openai::model(gateway, &decoded(name)).await,
            (None, Some(name)) if !name.contains('/') => openai::response(gateway, caller, name, query),
            _ => Err(not_found(path)),
        },
    }
}

/// Replaces each `%XX` of a path by its byte.
fn decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let hex = text.get(at + 1..at + 3).filter(|_| *byte == b'%');
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(value) => {
                out.push(value);
                at += 3;
            }
            None => {
                out.push(*byte);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// True for paths that need no token: their answers say nothing about users, or the administrator opened them.
fn is_open(gateway: &Gateway, path: &str) -> bool {
    matches!(path, "/health" | "/livez") || (path == METRICS && gateway.settings.open_metrics)
}

async fn open(gateway: &Gateway, path: &str) -> Result<Response<Body>, Failure> {
    match path {
        "/health" => health(gateway).await,
        // The process answers, whatever its daemon does: only its own hang is a reason to restart it.
        "/livez" => Ok(reply::json(&json!({"status": "ok"}))),
        _ => Ok(metrics(gateway).await),
    }
}

/// Status 200 if requests are answered: the daemon answers, and neither it nor the gateway is stopping. Routers rely on it.
async fn health(gateway: &Gateway) -> Result<Response<Body>, Failure> {
    let refused = |message: &str| Failure { retry_after_s: Some(1), ..Failure::new(503, message.to_owned()) };
    if gateway.ending.has_begun() {
        return Err(stopping());
    }
    match gateway.load.status(&gateway.shared.client).await {
        // The daemon's own words name its socket.
        None => Err(refused("the daemon does not answer: is rocmforged running?")),
        Some(status) if status.draining => Err(refused("the daemon is stopping")),
        Some(_) => Ok(reply::json(&json!({"status": "ok"}))),
    }
}

async fn metrics(gateway: &Gateway) -> Response<Body> {
    let mut page = gateway.metrics.page();
    page.push_str(&gateway.load.page(&gateway.shared.client, gateway.metrics.waiting()).await);
    reply::text(PROMETHEUS, page)
}

/// The paths that take a JSON object.
#[derive(Clone, Copy, Debug)]
enum Post {
    ChatCompletions,
    Completions,
    Embeddings,
    Rerank,
    Responses,
    Messages,
    CountTokens,
    OllamaChat,
    OllamaGenerate,
    OllamaShow,
    OllamaEmbed,
    OllamaEmbeddings,
}

impl Post {
    fn of(path: &str) -> Option<Self> {
        match path {
            "/v1/chat/completions" => Some(Self::ChatCompletions),
            "/v1/completions" => Some(Self::Completions),
            "/v1/embeddings" => Some(Self::Embeddings),
            // Clients of llama.cpp's server use all of these.
            "/v1/rerank" | "/rerank" | "/v1/reranking" | "/reranking" => Some(Self::Rerank),
            "/v1/responses" => Some(Self::Responses),
            "/v1/messages" => Some(Self::Messages),
            "/v1/messages/count_tokens" => Some(Self::CountTokens),
            "/api/chat" => Some(Self::OllamaChat),
            "/api/generate" => Some(Self::OllamaGenerate),
            "/api/embed" => Some(Self::OllamaEmbed),
            "/api/embeddings" => Some(Self::OllamaEmbeddings),
            "/api/show" => Some(Self::OllamaShow),
            _ => None,
        }
    }

    async fn run(
        self,
        gateway: &Arc<Gateway>,
        caller: Identity,
        params: Params,
        since: Instant,
    ) -> Result<Response<Body>, Failure> {
        match self {
            Self::ChatCompletions => openai::chat_completions(gateway, params, since).await,
            Self::Completions => openai::completions(gateway, params, since).await,
            Self::Embeddings => openai::embeddings(gateway, params).await,
            Self::Rerank => rerank::rerank(gateway, params).await,
            Self::Responses => openai::respond(gateway, caller, params, since).await,
            Self::Messages => anthropic::messages(gateway, params, since).await,
            Self::CountTokens => anthropic::count_tokens(gateway, params, since).await,
            Self::OllamaChat => ollama::chat(gateway, params, since).await,
            Self::OllamaGenerate => ollama::generate(gateway, params, since).await,
            Self::OllamaEmbed => ollama::embed(gateway, params, since).await,
            Self::OllamaEmbeddings => ollama::embeddings(gateway, params).await,
            Self::OllamaShow => ollama::show(gateway, params).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_paths_are_decoded() {
        for (path, name) in
            [("a%2Fb", "a/b"), ("a%20b%", "a b%"), ("%zz%C3%BC", "%zzü"), ("%", "%"), ("ü%2", "ü%2")]
        {
            assert_eq!(decoded(path), name);
        }
    }
}
