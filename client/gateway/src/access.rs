//! Decides who may ask: by a token where one is configured, and by the request's own words about where it comes from.
//!
//! A loopback address alone does not keep web pages out: a browser on the machine sends their requests there too. A page
//! may also have a name of its own that leads to 127.0.0.1. Both show in the headers `Origin` and `Host`.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use hyper::header::{AUTHORIZATION, HOST, HeaderMap, ORIGIN};
use sha2::{Digest, Sha256};

use crate::failure::Failure;

/// Fewest bytes of a token: 128 random bits have 22 characters in base 64.
const TOKEN_BYTES_MIN: usize = 16;

/// Most bytes of the file.
const FILE_BYTES_MAX: u64 = 1 << 16;

/// Header in which Anthropic's clients send their key.
const API_KEY: &str = "x-api-key";

/// The caller: the digest of the request's token. All callers without a token are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity(Option<[u8; 32]>);

impl Identity {
    /// An identity for tests.
    #[cfg(test)]
    pub const fn of_test(number: u8) -> Self {
        Self(Some([number; 32]))
    }
}

/// The tokens of a file, as digests.
#[derive(Clone, Debug)]
pub struct Tokens(Vec<[u8; 32]>);

impl Tokens {
    /// Reads a file with one token a line.
    ///
    /// # Errors
    /// A text that says why the file is not taken.
    pub fn read(path: &Path) -> Result<Self, String> {
        let failed = |reason: String| format!("{}: {reason}", path.display());
        let meta = fs::metadata(path).map_err(|error| failed(error.to_string()))?;
        if meta.len() > FILE_BYTES_MAX {
            return Err(failed(format!(
                "{} bytes, but a file of tokens has at most {FILE_BYTES_MAX}",
                meta.len()
            )));
        }
        if meta.mode() & 0o007 != 0 {
            return Err(failed(format!(
                "its mode {:03o} lets every user read it: chmod 600 it",
                meta.mode() & 0o777
            )));
        }
        let text = fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        Self::of(&text).map_err(failed)
    }

    fn of(text: &str) -> Result<Self, String> {
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        if lines.is_empty() {
            return Err(
                "it has no token: write one a line, such as `openssl rand -base64 32` prints".to_owned()
            );
        }
        if let Some(short) = lines.iter().find(|line| line.len() < TOKEN_BYTES_MIN) {
            let bytes = short.len();
            return Err(format!("a token has {bytes} bytes, but at least {TOKEN_BYTES_MIN} are asked for"));
        }
        Ok(Self(lines.iter().map(|line| digest(line.as_bytes())).collect()))
    }

    /// Compares digests, so that the time tells nothing about a token: every byte of every digest is looked at.
    fn has(&self, offered: &[u8]) -> bool {
        let offered = digest(offered);
        let mut found = false;
        for token in &self.0 {
            let differing = token.iter().zip(&offered).fold(0, |all, (a, b)| all | (a ^ b));
            found |= std::hint::black_box(differing) == 0;
        }
        found
    }
}

fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// The rules of one listening socket.
#[derive(Clone, Debug)]
pub enum Access {
    /// Requests carry one of these tokens.
    Token(Tokens),
    /// Requests come from this machine: a loopback address.
    Loopback,
    /// The socket's file permissions decide.
    File,
}

impl Access {
    /// The rules of a TCP address.
    ///
    /// # Errors
    /// A text that says why the gateway does not listen there.
    pub fn of_address(address: SocketAddr, tokens: Option<Tokens>) -> Result<Self, String> {
        match tokens {
            Some(tokens) => Ok(Self::Token(tokens)),
            None if address.ip().is_loopback() => Ok(Self::Loopback),
            None => Err(format!(
                "{address} can be reached from other machines: give a --token-file, or listen on 127.0.0.1 or a Unix socket"
            )),
        }
    }

    /// Checks a request, and says who asks.
    ///
    /// # Errors
    /// A failure of status 401 or 403.
    pub fn check(&self, headers: &HeaderMap, authority: Option<&str>) -> Result<Identity, Failure> {
        match self {
            Self::File => Ok(Identity(None)),
            Self::Token(tokens) => match offered(headers) {
                Some(token) if tokens.has(token) => Ok(Identity(Some(digest(token)))),
                Some(_) => {
                    Err(Failure::new(401, "the token is not one of the gateway's").coded("invalid_api_key"))
                }
                None => Err(Failure::new(401, "a token is required: send `Authorization: Bearer TOKEN`")
                    .coded("invalid_api_key")),
            },
            Self::Loopback => from_this_machine(headers, authority).map(|()| Identity(None)),
        }
    }

    /// Checks a request that needs no token.
    ///
    /// # Errors
    /// A failure of status 403.
    pub fn check_place(&self, headers: &HeaderMap, authority: Option<&str>) -> Result<(), Failure> {
        match self {
            Self::File | Self::Token(_) => Ok(()),
            Self::Loopback => from_this_machine(headers, authority),
        }
    }
}

/// The token of a request, in OpenAI's header or in Anthropic's.
fn offered(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(key) = headers.get(API_KEY) {
        return Some(key.as_bytes());
    }
    let value = headers.get(AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

fn from_this_machine(headers: &HeaderMap, authority: Option<&str>) -> Result<(), Failure> {
    let refused = |what: &str, value: &str| {
        let value: String = value.chars().take(100).collect();
        Failure::new(
            403,
            format!("{what} {value:?} is not this machine: without a token, only its own programs may ask"),
        )
    };
    let hosts = headers.get_all(HOST).iter().map(|value| value.to_str().unwrap_or("?"));
    for host in hosts.chain(authority) {
        if !is_loopback(host) {
            return Err(refused("the request's host", host));
        }
    }
    for origin in headers.get_all(ORIGIN) {
        let origin = origin.to_str().unwrap_or("?");
        let host = origin.split_once("://").map_or(origin, |(_, host)| host);
        if !is_loopback(host) {
            return Err(refused("the page's origin", origin));
        }
    }
    Ok(())
}

/// True for `localhost` and loopback addresses, with or without a port.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((name, _port)) => name,
        None => host.rsplit_once(':').map_or(host, |(name, _port)| name),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in list {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn a_token_is_taken_from_either_header() {
        let tokens = Tokens::of("0123456789abcdef\n\n fedcba9876543210 \n").unwrap();
        let access = Access::Token(tokens);
        let status =
            |list: &[_]| access.check(&headers(list), None).map(drop).map_err(|failure| failure.status);
        assert_eq!(status(&[("authorization", "Bearer 0123456789abcdef")]), Ok(()));
        assert_eq!(status(&[("authorization", "bearer fedcba9876543210")]), Ok(()));
        assert_eq!(status(&[("x-api-key", "fedcba9876543210"), ("host", "elsewhere.example")]), Ok(()));
        for bad in ["Bearer 0123456789abcde", "Bearer 0123456789abcdef0", "Basic 0123456789abcdef", "Bearer "]
        {
            assert_eq!(status(&[("authorization", bad)]), Err(401), "{bad}");
        }
        assert_eq!(status(&[]), Err(401));
        let identity = |token: &'static str| access.check(&headers(&[("x-api-key", token)]), None).ok();
        assert_eq!(
            identity("0123456789abcdef"),
            access.check(&headers(&[("authorization", "Bearer 0123456789abcdef")]), None).ok()
        );
        assert_ne!(identity("0123456789abcdef"), identity("fedcba9876543210"));
    }

    #[test]
    fn short_tokens_and_empty_files_are_refused() {
        assert!(Tokens::of("\n \n").unwrap_err().contains("no token"));
        assert!(Tokens::of("0123456789abcdef\nshort").unwrap_err().contains("5 bytes"));
    }

    #[test]
    fn web_pages_do_not_pass_for_programs_of_this_machine() {
        let status = |list: &[_]| {
            Access::Loopback.check(&headers(list), None).map(drop).map_err(|failure| failure.status)
        };
        for host in ["localhost", "localhost:11435", "127.0.0.1:11435", "[::1]:11435", "127.8.9.10"] {
            assert_eq!(status(&[("host", host)]), Ok(()), "{host}");
        }
        for host in
            ["evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", "10.0.0.1:1", "[::2]", ""]
        {
            assert_eq!(status(&[("host", host)]), Err(403), "{host}");
        }
        assert_eq!(status(&[("host", "localhost"), ("host", "evil.example")]), Err(403));
        assert_eq!(status(&[("host", "localhost"), ("origin", "https://evil.example")]), Err(403));
        assert_eq!(status(&[("host", "localhost"), ("origin", "null")]), Err(403));
        assert_eq!(status(&[("host", "localhost"), ("origin", "http://localhost:3000")]), Ok(()));
    }

    #[test]
    fn other_machines_need_a_token() {
        let refusal = Access::of_address("0.0.0.0:1".parse().unwrap(), None).unwrap_err();
        assert!(refusal.contains("--token-file"), "{refusal}");
        assert!(Access::of_address("[::]:1".parse().unwrap(), None).is_err());
        assert!(Access::of_address("[::1]:1".parse().unwrap(), None).is_ok());
        let tokens = Tokens::of("0123456789abcdef").unwrap();
        assert!(Access::of_address("0.0.0.0:1".parse().unwrap(), Some(tokens)).is_ok());
    }
}
