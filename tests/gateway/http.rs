//! A small HTTP client that knows only the format, and keeps the bytes as they came.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use serde_json::{Value, json};

use crate::rig::PATIENCE;

/// A response.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Response {
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Asserts that the answer is OpenAI's error for that field of the request.
    #[track_caller]
    pub fn blames(&self, field: &str) {
        let error = &self.json()["error"];
        assert_eq!((self.status, &error["type"]), (400, &json!("invalid_request_error")), "{field}: {error}");
        assert_eq!(error["param"], field, "{error}");
        assert!(error["message"].as_str().unwrap().starts_with(&format!("{field}: ")), "{error}");
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(of, _)| of == name).map(|(_, value)| value.as_str())
    }

    /// The data of a stream's events, without the last one, which must be `[DONE]`.
    #[track_caller]
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.header("content-type"), Some("text/event-stream"), "{self:?}");
        let mut events: Vec<&str> = self.body.split_terminator("\n\n").collect();
        assert_eq!(events.pop(), Some("data: [DONE]"), "{}", self.body);
        events
            .iter()
            .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
            .collect()
    }
}

/// A connection to the gateway.
pub struct Connection {
    reader: BufReader<TcpStream>,
}

impl Connection {
    pub fn open(address: &str) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { reader: BufReader::new(stream) }
    }

    pub fn send(&mut self, text: &str) {
        self.send_bytes(text.as_bytes());
    }

    pub fn send_bytes(&mut self, bytes: &[u8]) {
        // The other side may close before it has read all; the test then looks at what it said.
        let _ = self.reader.get_mut().write_all(bytes);
    }

    pub fn post(&mut self, path: &str, body: &str) {
        self.send(&format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ));
    }

    pub fn get(&mut self, path: &str) {
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
    }

    /// Reads a line; `None` at the connection's end.
    pub fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        match self.reader.read_line(&mut line) {
            Ok(0) => None,
            Ok(_) => Some(line.trim_end_matches(['\r', '\n']).to_owned()),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => None,
            Err(error) => panic!("{error}"),
        }
    }

    /// Reads status and headers.
    pub fn head(&mut self) -> Option<Response> {
        let first = self.line()?;
        let status = first.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status: {first}"));
        let mut headers = Vec::new();
        while let Some(line) = self.line().filter(|line| !line.is_empty()) {
            let (name, value) = line.split_once(':').unwrap();
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        Some(Response { status, headers, body: String::new() })
    }

    /// Reads a whole response; `None` if the connection ended instead. The wait for a body is passed over.
    pub fn response(&mut self) -> Option<Response> {
        let mut response = self.head()?;
        while response.status == 100 {
            response = self.head()?;
        }
        let mut body = Vec::new();
        if let Some(length) = response.header("content-length") {
            body.resize(length.parse().unwrap(), 0);
            self.reader.read_exact(&mut body).unwrap();
        } else {
            assert_eq!(response.header("transfer-encoding"), Some("chunked"), "{response:?}");
            while let Some(chunk) = self.chunk() {
                body.extend(chunk);
            }
        }
        response.body = String::from_utf8(body).unwrap();
        Some(response)
    }

    /// Reads all bytes up to the connection's end, which may be a reset.
    pub fn rest(mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let _ = self.reader.read_to_end(&mut bytes);
        bytes
    }

    /// Reads one chunk; `None` for the last, empty one.
    pub fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = usize::from_str_radix(&self.line().expect("a chunk"), 16).unwrap();
        let mut chunk = vec![0; size];
        self.reader.read_exact(&mut chunk).unwrap();
        assert_eq!(self.line().as_deref(), Some(""));
        (size > 0).then_some(chunk)
    }
}
