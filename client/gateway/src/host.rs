//! The rules of HTTP for a request's host, which the HTTP library leaves to its user.
//!
//! A proxy before the gateway may choose by one host what the gateway would judge by another. RFC 9112, section 3.2, has
//! servers refuse requests in which they could differ.

use std::net::Ipv6Addr;

use hyper::header::HOST;
use hyper::http::request::Parts;
use hyper::{Method, Version};

use crate::failure::Failure;

/// Checks that a request has one valid `Host`; only HTTP/1.0 may have none. A host alone is the target of CONNECT only.
///
/// # Errors
/// A failure of status 400.
pub fn check(head: &Parts) -> Result<(), Failure> {
    if head.method != Method::CONNECT && head.uri.authority().is_some() && head.uri.scheme().is_none() {
        return Err(Failure::invalid("the request's target is a host without a path"));
    }
    let mut hosts = head.headers.get_all(HOST).iter();
    match (hosts.next(), hosts.next()) {
        (None, _) if head.version == Version::HTTP_10 => Ok(()),
        (None, _) => Err(Failure::invalid("a request of HTTP/1.1 needs a Host header")),
        (Some(_), Some(_)) => Err(Failure::invalid("a request has one Host header, not several")),
        (Some(host), None) if is_valid(host.as_bytes()) => Ok(()),
        (Some(_), None) => {
            Err(Failure::invalid("the Host header is no name or address, perhaps with `:` and a port"))
        }
    }
}

/// True for `uri-host [ ":" port ]` (RFC 9110, section 7.2). The empty value stands for a target without a host.
fn is_valid(value: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(value) else { return false };
    let (host_fits, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, rest)) => {
            (address.parse::<Ipv6Addr>().is_ok(), rest.strip_prefix(':').or(rest.is_empty().then_some("")))
        }
        None => match text.split_once(':') {
            Some((name, port)) => (is_name(name), Some(port)),
            None => (is_name(text), Some("")),
        },
    };
    host_fits && port.is_some_and(|port| port.bytes().all(|byte| byte.is_ascii_digit()))
}

/// True for `reg-name` (RFC 3986, section 3.2.2), which IPv4 addresses are too.
fn is_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    while let Some(byte) = bytes.next() {
        let fits = match byte {
            b'%' => bytes.by_ref().take(2).filter(u8::is_ascii_hexdigit).count() == 2,
            _ => byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=".contains(&byte),
        };
        if !fits {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    #![allow(clippy::expect_used)] // tests fail by panicking

    use hyper::Request;

    use super::*;

    fn status(version: Version, target: &str, hosts: &[&str]) -> Option<u16> {
        let request = Request::builder().version(version).uri(target);
        let request = hosts.iter().fold(request, |request, host| request.header(HOST, *host));
        check(&request.body(()).expect("a request").into_parts().0).err().map(|failure| failure.status)
    }

    #[test]
    fn a_request_has_one_host_and_an_old_one_may_have_none() {
        assert_eq!(status(Version::HTTP_11, "/", &[]), Some(400));
        assert_eq!(status(Version::HTTP_10, "/", &[]), None);
        for version in [Version::HTTP_10, Version::HTTP_11] {
            assert_eq!(status(version, "/", &["localhost"]), None);
            assert_eq!(status(version, "http://localhost/", &["localhost"]), None);
            assert_eq!(status(version, "localhost:80", &["localhost"]), Some(400));
            assert_eq!(status(version, "/", &["localhost", "localhost"]), Some(400));
            assert_eq!(status(version, "/", &["local host"]), Some(400));
        }
    }

    #[test]
    fn a_host_is_a_name_or_an_address_with_a_port() {
        for good in [
            "",
            "localhost",
            "localhost:",
            "127.0.0.1:11435",
            "[::1]",
            "[::1]:80",
            "a-b_c.example",
            "a%20b",
            "x,y",
        ] {
            assert!(is_valid(good.as_bytes()), "{good}");
        }
        for bad in [
            "a b",
            "user@localhost",
            "localhost/x",
            "localhost?x",
            "localhost#x",
            "a\\b",
            "localhost:80a",
            "a:1:2",
            "::1",
            "[::1",
            "[::1]x",
            "[::1]:x",
            "[localhost]",
            "a%2",
            "a%zz",
            "http://localhost",
            "\"a\"",
            "a\tb",
        ] {
            assert!(!is_valid(bad.as_bytes()), "{bad}");
        }
        assert!(!is_valid(b"local\xffhost"));
    }
}
