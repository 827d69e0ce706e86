//! Transfers over HTTP and TLS.

use std::io::{ErrorKind, Read};
use std::thread;
use std::time::Duration;

use ureq::http::{HeaderMap, Response, StatusCode, Uri};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body, Error};

use super::PullError;
use super::part::Part;
use super::source::Wanted;

/// Most time for a connection, and for the first byte of an answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// A transfer without a byte for so long has broken off.
const SILENCE: Duration = Duration::from_secs(30);

/// A transfer that brings nothing so many times in a row is given up.
const ATTEMPTS: u32 = 4;

/// Pause before the second attempt; it doubles.
const PAUSE: Duration = Duration::from_millis(250);

/// Bytes of one read.
const READ_BYTES: usize = 256 << 10;

/// Redirects that are followed.
const REDIRECTS: u32 = 10;

/// A client of HTTP for one file.
pub struct Web {
    agent: Agent,
    token: Option<String>,
}

impl Web {
    /// A client for the file. The token is sent to the hub alone, also when that redirects elsewhere.
    pub fn new(wanted: &Wanted, token: Option<&str>) -> Result<Self, PullError> {
        let is_protected = wanted.sha256.is_some() && !wanted.of_hub;
        let token = token.filter(|_| wanted.of_hub).map(str::to_owned);
        Ok(Self { agent: agent(&wanted.url, is_protected)?, token })
    }

    /// Asks for the file from the byte `from` on; `tag` is the version that the bytes before are of.
    fn get(&self, url: &str, from: u64, tag: Option<&str>) -> Result<Response<Body>, PullError> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if from > 0 {
            request = request.header("Range", format!("bytes={from}-"));
            if let Some(tag) = tag {
                request = request.header("If-Range", tag);
            }
        }
        request.call().map_err(|error| web_error(url, error))
    }
}

/// An agent for this URL. A file over http must have a digest, or come from this machine. A transfer over https never becomes one over http.
pub fn agent(url: &str, is_protected: bool) -> Result<Agent, PullError> {
    let parsed: Uri = url
        .parse()
        .map_err(|error| PullError::Web { url: url.to_owned(), reason: format!("it is no URL: {error}") })?;
    let encrypted = parsed.scheme_str() == Some("https");
    let host = parsed.host().unwrap_or_default();
    let own = ["localhost", "127.0.0.1", "[::1]"].contains(&host);
    if !encrypted && !own && !is_protected {
        return Err(PullError::Unprotected { url: url.to_owned() });
    }
    // Certificates are those that the machine trusts. A second call leaves the first provider.
    let _ = rustls::crypto::CryptoProvider::install_default(rustls::crypto::ring::default_provider());
    let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier);
    let config = Agent::config_builder()
        .tls_config(tls.build())
        .https_only(encrypted)
        .http_status_as_error(false)
        .max_redirects(REDIRECTS)
        .timeout_resolve(Some(CONNECT_TIMEOUT))
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .timeout_recv_response(Some(ANSWER_TIMEOUT))
        .timeout_per_read(Some(SILENCE))
        .user_agent(concat!("rocmforge-client/", env!("CARGO_PKG_VERSION")));
    Ok(config.build().into())
}

/// The error of a request without an answer.
pub fn web_error(url: &str, error: Error) -> PullError {
    let url = url.to_owned();
    let of_tls = |error: &rustls::Error| match error {
        rustls::Error::InvalidCertificate(_) => Some(error.to_string()),
        _ => None,
    };
    let refused = match &error {
        Error::Rustls(error) => of_tls(error),
        Error::Io(error) => error.get_ref().and_then(|inner| inner.downcast_ref()).and_then(of_tls),
        _ => None,
    };
    match (refused, error) {
        (Some(reason), _) => PullError::Certificate { url, reason },
        (None, Error::RequireHttpsOnly(to)) => {
            PullError::Web { url, reason: format!("it leads to {to}, which is not encrypted") }
        }
        (None, Error::Io(error)) => {
            let reason = format!("its server cannot be asked: {error}; check the address and the network");
            PullError::Web { url, reason }
        }
        (None, error) => PullError::Web { url, reason: error.to_string() },
    }
}

/// Fetches what the part lacks. A transfer that breaks off goes on, as long as something comes.
///
/// `progress` gets the bytes that are there, and those of the whole file if the server tells.
pub fn transfer(
    web: &Web,
    wanted: &Wanted,
    part: &mut Part,
    progress: &mut dyn FnMut(u64, Option<u64>),
) -> Result<(), PullError> {
    let (mut failed, mut pause) = (0, PAUSE);
    loop {
        let before = part.len();
        let reason = match attempt(web, wanted, part, progress) {
            Ok(None) => return Ok(()),
            Ok(Some(reason)) => reason,
            // A request that fails after some bytes came may work again. Otherwise the first attempt tells what is wrong.
            Err(PullError::Web { reason, .. }) if before > 0 => reason,
            Err(PullError::Status { status, .. }) if before > 0 && status >= 500 => {
                format!("the server answers {status}")
            }
            Err(error) => return Err(error),
        };
        (failed, pause) = if part.len() > before { (1, PAUSE) } else { (failed + 1, pause * 2) };
        if failed >= ATTEMPTS {
            return Err(PullError::BrokenOff { url: wanted.url.clone(), bytes: part.len(), reason });
        }
        thread::sleep(pause);
    }
}

/// One request. `None` if the file is whole, otherwise why the transfer broke off.
fn attempt(
    web: &Web,
    wanted: &Wanted,
    part: &mut Part,
    progress: &mut dyn FnMut(u64, Option<u64>),
) -> Result<Option<String>, PullError> {
    if wanted.bytes == Some(part.len()) {
        return Ok(None);
    }
    let response = web.get(&wanted.url, part.len(), part.tag())?;
    let total = match begin(wanted, part, &response)? {
        Begun::At(total) => total,
        Begun::Again => return Ok(Some("the server has not what comes after the first bytes".to_owned())),
    };
    if let Some(total) = total {
        part.check_room(total.saturating_sub(part.len()))?;
    }
    let mut reader = response.into_body().into_reader();
    let mut buffer = vec![0; READ_BYTES];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => part.write(&buffer[..count], &wanted.url)?,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Ok(Some(error.to_string())),
        }
        if total.is_some_and(|total| part.len() > total) {
            part.restart()?;
            return Ok(Some("more came than the server announced".to_owned()));
        }
        progress(part.len(), total);
    }
    let missing = total.filter(|total| part.len() < *total);
    Ok(missing.map(|total| format!("the server sent {} of {total} bytes", part.len())))
}

/// Where an answer goes on.
enum Begun {
    /// Where the part ends; with the size of the whole file, if the server tells.
    At(Option<u64>),
    /// The part was dropped: ask again.
    Again,
}

/// Takes an answer's head: it goes on where the part ends, or begins anew.
fn begin(wanted: &Wanted, part: &mut Part, response: &Response<Body>) -> Result<Begun, PullError> {
    let headers = response.headers();
    let length = number(headers, "content-length");
    let total = match response.status() {
        StatusCode::OK => {
            part.restart()?;
            length
        }
        StatusCode::PARTIAL_CONTENT => match range(headers) {
            Some((from, total)) if from == part.len() => total,
            _ => {
                part.restart()?;
                return Ok(Begun::Again);
            }
        },
        StatusCode::RANGE_NOT_SATISFIABLE if part.len() > 0 => {
            part.restart()?;
            return Ok(Begun::Again);
        }
        status => return Err(PullError::Status { url: wanted.url.clone(), status: status.as_u16() }),
    };
    // A weak tag (`W/`) names no bytes.
    let tag = text(headers, "etag").filter(|tag| tag.starts_with('"')).or(part.tag()).map(str::to_owned);
    part.comes_from(&wanted.url, tag.as_deref())?;
    Ok(Begun::At(total.or(wanted.bytes)))
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    text(headers, name)?.trim().parse().ok()
}

/// First byte and whole size of `bytes 100-199/200`; the size may be `*`.
fn range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let (range, total) = text(headers, "content-range")?.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, total.parse().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_not_there_is_told_with_what_to_do() {
        // Freed at once: nobody listens there.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let url = format!("http://127.0.0.1:{port}/x.gguf");
        let error = agent(&url, false).unwrap().get(&url).call().unwrap_err();
        let told = web_error(&url, error).to_string();
        assert!(
            told.starts_with(&format!("{url}: its server cannot be asked: Connection refused")),
            "{told}"
        );
        assert!(told.ends_with("; check the address and the network"), "{told}");
    }
}
