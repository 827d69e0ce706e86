//! Decides who may ask: by a token where one is configured, and by the request's own words about where it comes from.
//!
//! A loopback address alone does not keep web pages out: a browser on the machine sends their requests there too. A page
//! may also have a name of its own that leads to 127.0.0.1. Both show in the headers `Origin` and `Host`.

use std::fmt;
use std::fs;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use hyper::header::{AUTHORIZATION, HOST, HeaderMap, ORIGIN};
use sha2::Sha256;

use crate::failure::Failure;

/// Fewest bytes of a token: 128 random bits have 22 characters in base 64.
const TOKEN_BYTES_MIN: usize = 16;

/// Most bytes of the file.
const FILE_BYTES_MAX: u64 = 1 << 16;

/// Header in which Anthropic's clients send their key.
const API_KEY: &str = "x-api-key";

/// SHA-256 of a token.
pub type Digest = [u8; 32];

/// The caller of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Identity {
    /// All callers without a token, where nothing else tells them apart.
    Anyone,
    /// The digest of the request's token.
    Token(Digest),
    /// The uid of the process at the other end of a Unix socket.
    Peer(u32),
}

impl Identity {
    /// An identity for tests.
    #[cfg(test)]
    pub const fn of_test(number: u8) -> Self {
        Self::Token([number; 32])
    }
}

/// Bits of an IPv6 address that name a machine of a network: whoever has one of them has all.
const HOST_BITS: u32 = 64;

/// The other end of connections, as far as the gateway knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Peer {
    /// All users of this machine: a loopback address does not tell them apart.
    Machine,
    /// Another machine, or an IPv6 network.
    Address(IpAddr),
    /// A user of this machine, by uid.
    User(u32),
    /// The holder of the token on this line of the file.
    Token(usize),
}

impl Peer {
    /// The peer at a TCP address.
    pub fn of_address(address: IpAddr) -> Self {
        match address.to_canonical() {
            address if address.is_loopback() => Self::Machine,
            IpAddr::V6(address) => {
                let network = address.to_bits() & (u128::MAX << HOST_BITS);
                Self::Address(Ipv6Addr::from_bits(network).into())
            }
            address => Self::Address(address),
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine => f.write_str("this machine"),
            Self::Address(IpAddr::V6(network)) => write!(f, "{network}/{}", u128::BITS - HOST_BITS),
            Self::Address(address) => write!(f, "{address}"),
            Self::User(uid) => write!(f, "uid {uid}"),
            Self::Token(line) => write!(f, "the token on line {line}"),
        }
    }
}

/// The tokens of a file.
#[derive(Clone, Debug)]
pub struct Tokens(Arc<[Token]>);

/// A token, as its digest.
#[derive(Clone, Copy, Debug)]
pub struct Token {
    /// Of its text.
    pub digest: Digest,
    /// Number of its user among the daemon's, where the file has one behind the token.
    pub user: Option<u32>,
    /// Its line in the file, from 1.
    pub line: usize,
}

impl Token {
    /// Reads a line.
    fn of(line: usize, text: &str) -> Result<Self, String> {
        let parts = text.rsplit_once(char::is_whitespace);
        let numbered = parts.filter(|(_, number)| number.bytes().all(|byte| byte.is_ascii_digit()));
        let (token, user) = match numbered {
            None => (text, None),
            Some((token, number)) => {
                let user =
                    number.parse().map_err(|_| format!("line {line}: {number} is no number of a user"))?;
                (token.trim_end(), Some(user))
            }
        };
        if token.len() < TOKEN_BYTES_MIN {
            let bytes = token.len();
            return Err(format!("a token has {bytes} bytes, but at least {TOKEN_BYTES_MIN} are asked for"));
        }
        Ok(Self { digest: digest(token.as_bytes()), user, line })
    }
}

impl Tokens {
    /// Reads a file with one token a line, and behind it, if wanted, white space and the number of its user.
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

    /// The tokens of a file with this text.
    pub(crate) fn of(text: &str) -> Result<Self, String> {
        let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
        let mut tokens: Vec<Token> = Vec::new();
        for (line, text) in lines.filter(|(_, text)| !text.is_empty()) {
            let token = Token::of(line, text)?;
            match tokens.iter().find(|known| known.digest == token.digest) {
                None => tokens.push(token),
                Some(known) if known.user == token.user => {}
                Some(known) => {
                    return Err(format!("lines {} and {line} have one token for two users", known.line));
                }
            }
        }
        if tokens.is_empty() {
            return Err(
                "it has no token: write one a line, such as `openssl rand -base64 32` prints".to_owned()
            );
        }
        Ok(Self(tokens.into()))
    }

    /// All of them, in the order of their lines.
    pub fn all(&self) -> &[Token] {
        &self.0
    }

    /// Compares digests, so that the time tells nothing about a token: every byte of every digest is looked at.
    fn has(&self, offered: &[u8]) -> bool {
        let offered = digest(offered);
        let mut found = false;
        for token in self.all() {
            let differing = token.digest.iter().zip(&offered).fold(0, |all, (a, b)| all | (a ^ b));
            found |= std::hint::black_box(differing) == 0;
        }
        found
    }
}

fn digest(bytes: &[u8]) -> Digest {
    <Sha256 as sha2::Digest>::digest(bytes).into()
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
    /// A connection of such a socket, whose other end is a process of this uid.
    Peer(u32),
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

    /// The rules of one connection of this peer.
    pub fn of_connection(&self, peer: Peer) -> Self {
        match (self, peer) {
            (Self::File, Peer::User(uid)) => Self::Peer(uid),
            (rules, _) => rules.clone(),
        }
    }

    /// The caller as a peer; `None` if the request says no more than its connection.
    pub fn peer(&self, caller: Identity) -> Option<Peer> {
        match (self, caller) {
            (_, Identity::Peer(uid)) => Some(Peer::User(uid)),
            (Self::Token(tokens), Identity::Token(digest)) => {
                let known = tokens.all().iter().find(|token| token.digest == digest);
                known.map(|token| Peer::Token(token.line))
            }
            _ => None,
        }
    }

    /// True if requests may come from several callers that can be told apart.
    pub fn tells_callers_apart(&self) -> bool {
        match self {
            Self::Token(tokens) => tokens.all().len() > 1,
            Self::Peer(_) => true,
            Self::Loopback | Self::File => false,
        }
    }

    /// Checks a request, and says who asks.
    ///
    /// # Errors
    /// A failure of status 401 or 403.
    pub fn check(&self, headers: &HeaderMap, authority: Option<&str>) -> Result<Identity, Failure> {
        match self {
            Self::File => Ok(Identity::Anyone),
            Self::Peer(uid) => Ok(Identity::Peer(*uid)),
            Self::Token(tokens) => match offered(headers) {
                Some(token) if tokens.has(token) => Ok(Identity::Token(digest(token))),
                Some(_) => {
                    Err(Failure::new(401, "the token is not one of the gateway's").coded("invalid_api_key"))
                }
                None => Err(Failure::new(401, "a token is required: send `Authorization: Bearer TOKEN`")
                    .coded("invalid_api_key")),
            },
            Self::Loopback => from_this_machine(headers, authority).map(|()| Identity::Anyone),
        }
    }

    /// Checks a request that needs no token.
    ///
    /// # Errors
    /// A failure of status 403.
    pub fn check_place(&self, headers: &HeaderMap, authority: Option<&str>) -> Result<(), Failure> {
        match self {
            Self::File | Self::Peer(_) | Self::Token(_) => Ok(()),
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
        assert!(Tokens::of("0123456789abcde 7").unwrap_err().contains("15 bytes"));
        assert!(Tokens::of("0123456789abcdef 4294967296").unwrap_err().contains("line 1"));
    }

    #[test]
    fn a_token_may_have_the_number_of_its_user_behind_it() {
        let text = "0123456789abcdef 7\n\nfedcba9876543210\t \t8 \n0123 4567 89ab cdef\nfedcba98765432107\n0123456789abcdef 7";
        let tokens = Tokens::of(text).unwrap();
        let found: Vec<_> = tokens.all().iter().map(|token| (token.line, token.user)).collect();
        assert_eq!(found, [(1, Some(7)), (3, Some(8)), (4, None), (5, None)]);
        for (token, has) in
            [("0123456789abcdef", true), ("0123456789abcdef 7", false), ("0123 4567 89ab cdef", true)]
        {
            assert_eq!(tokens.has(token.as_bytes()), has, "{token}");
        }
        let twice = Tokens::of("0123456789abcdef 7\n0123456789abcdef").unwrap_err();
        assert!(twice.contains("lines 1 and 2"), "{twice}");
    }

    #[test]
    fn peers_are_machines_networks_users_and_tokens() {
        let of_address = |text: &str| Peer::of_address(text.parse().unwrap()).to_string();
        for (address, peer) in [
            ("127.0.0.9", "this machine"),
            ("::1", "this machine"),
            ("::ffff:127.0.0.1", "this machine"),
            ("::ffff:10.1.2.3", "10.1.2.3"),
            ("10.1.2.3", "10.1.2.3"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ] {
            assert_eq!(of_address(address), peer);
        }
        let access = Access::Token(Tokens::of("0123456789abcdef\n\nfedcba9876543210").unwrap());
        let caller = access.check(&headers(&[("x-api-key", "fedcba9876543210")]), None).unwrap();
        assert_eq!(access.peer(caller).map(|peer| peer.to_string()).unwrap(), "the token on line 3");
        assert!(access.tells_callers_apart());
        assert!(!Access::Token(Tokens::of("0123456789abcdef").unwrap()).tells_callers_apart());
        assert_eq!(Access::Peer(7).peer(Identity::Peer(7)), Some(Peer::User(7)));
        assert_eq!(Access::Loopback.peer(Identity::Anyone), None);
    }

    #[test]
    fn callers_of_a_unix_socket_are_told_apart_by_uid() {
        let caller = |access: Access, peer| access.of_connection(peer).check(&headers(&[]), None).ok();
        assert_eq!(caller(Access::File, Peer::User(1000)), Some(Identity::Peer(1000)));
        assert_eq!(caller(Access::File, Peer::Machine), Some(Identity::Anyone));
        let tokens = Access::Token(Tokens::of("0123456789abcdef").unwrap());
        assert_eq!(caller(tokens, Peer::User(1000)), None, "a token is asked for all the same");
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
