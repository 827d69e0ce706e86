//! A server of HTTP for one answer a connection.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// A request.
#[derive(Clone, Debug)]
pub struct Asked {
    pub path: String,
    /// Names in small letters.
    pub headers: HashMap<String, String>,
}

impl Asked {
    /// First byte of the wanted range, 0 without one.
    pub fn from(&self) -> usize {
        let range = self.headers.get("range").and_then(|range| range.strip_prefix("bytes="));
        range.map_or(0, |range| range.trim_end_matches('-').parse().unwrap())
    }
}

/// A response.
pub struct Answered {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// Only so many bytes of the body are sent.
    pub cut: Option<usize>,
}

impl Answered {
    pub fn status(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Vec::new(), cut: None }
    }

    /// The whole body, or what comes after the byte from which it is wanted.
    pub fn of(body: &[u8], asked: &Asked, tag: Option<&str>) -> Self {
        let tagged: Vec<_> = tag.map(|tag| ("ETag", tag.to_owned())).into_iter().collect();
        let from = asked.from();
        let is_same = asked.headers.get("if-range").is_none_or(|wanted| tag == Some(wanted));
        if from == 0 || !is_same {
            return Self { status: 200, headers: tagged, body: body.to_vec(), cut: None };
        }
        if from >= body.len() {
            return Self::status(416);
        }
        let range = ("Content-Range", format!("bytes {from}-{}/{}", body.len() - 1, body.len()));
        Self { status: 206, headers: [tagged, vec![range]].concat(), body: body[from..].to_vec(), cut: None }
    }

    pub fn cut(self, bytes: usize) -> Self {
        Self { cut: Some(bytes), ..self }
    }
}

/// A server on a port of its own until the test ends.
pub struct Server {
    pub port: u16,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Server {
    pub fn start(answer: impl Fn(&Asked) -> Answered + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (kept, answer) = (Arc::clone(&asked), Arc::new(answer));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (kept, answer) = (Arc::clone(&kept), Arc::clone(&answer));
                thread::spawn(move || serve(&stream.unwrap(), &kept, &*answer));
            }
        });
        Self { port, asked }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    /// All requests so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

fn serve(stream: &TcpStream, kept: &Mutex<Vec<Asked>>, answer: &dyn Fn(&Asked) -> Answered) {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let path = first.split(' ').nth(1).unwrap().to_owned();
    let headers = lines.take_while(|line| !line.is_empty()).map(|line| {
        let (name, value) = line.split_once(": ").unwrap();
        (name.to_lowercase(), value.to_owned())
    });
    let asked = Asked { path, headers: headers.collect() };
    kept.lock().unwrap().push(asked.clone());
    let Answered { status, headers, body, cut } = answer(&asked);
    let mut head = format!("HTTP/1.1 {status} x\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    let mut stream = stream;
    let sent = &body[..cut.unwrap_or(body.len())];
    // A client that refuses what comes has hung up.
    let _ = stream.write_all(format!("{head}\r\n").as_bytes()).and_then(|()| stream.write_all(sent));
    let _ = stream.shutdown(Shutdown::Write);
    let _ = stream.read(&mut [0]);
}
