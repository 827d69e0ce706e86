//! The task that serves one connection's socket.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use interprocess::os::unix::uds_local_socket::tokio::Stream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::sleep_until;

use super::connection::Shared;
use crate::connection::{disconnected, milliseconds};
use crate::error::{ClientError, ProtocolError};
use crate::transport::{Frame, FrameReader};
use crate::watch::{Due, Watch};
use crate::wire::{Op, PingRequest};

/// Bytes of a buffer that are kept for the next frames; a larger one is given back.
const BUFFER_KEPT_BYTES: usize = 64 * 1024;

/// The socket, and the state that only its task has.
struct Driver {
    shared: Arc<Shared>,
    socket: Stream,
    reader: FrameReader,
    /// Frames being written, and how many of their bytes are.
    out: Vec<u8>,
    written: usize,
    watch: Watch,
    /// Whether a request was open in the last round, so that silence counted.
    waiting: bool,
    /// Stream of the last ping.
    ping_stream: u32,
}

/// Reads and writes until the connection breaks or nothing uses it any more.
pub(super) async fn drive(shared: Arc<Shared>, socket: Stream, ping_after: Duration, ping_timeout: Duration) {
    let reader = FrameReader::new(shared.hello.limits.max_frame);
    let watch = Watch::new(ping_after, ping_timeout);
    let mut driver =
        Driver { shared, socket, reader, out: vec![], written: 0, watch, waiting: false, ping_stream: 0 };
    if let Err(error) = driver.run().await {
        let shared = &driver.shared;
        shared.break_with(&mut shared.state(), error);
    }
}

impl Driver {
    async fn run(&mut self) -> Result<(), ClientError> {
        loop {
            if self.next_output()? {
                return Ok(());
            }
            let check = self.next_check();
            let wait = async {
                match check {
                    Some(check) => sleep_until(check.into()).await,
                    None => std::future::pending().await,
                }
            };
            let (mut socket_in, mut socket_out) = (&self.socket, &self.socket);
            let left = &self.out[self.written..];
            tokio::select! {
                () = self.shared.work.notified() => {}
                // Both lose no byte when another branch is taken.
                read = socket_in.read_buf(self.reader.buffer()) => {
                    if read.map_err(|error| disconnected(&error))? == 0 {
                        return Err(disconnected(&io::ErrorKind::UnexpectedEof.into()));
                    }
                    self.watch.heard(Instant::now());
                    self.file()?;
                }
                written = socket_out.write(left), if !left.is_empty() => {
                    self.written += written.map_err(|error| disconnected(&error))?;
                }
                () = wait => self.silent()?,
            }
        }
    }

    /// Takes frames to write when the last ones are written. True if nothing uses the connection any more: its end cancels
    /// every request.
    fn next_output(&mut self) -> Result<bool, ClientError> {
        let mut state = self.shared.state();
        if let Some(error) = &state.broken {
            return Err(error.clone());
        }
        if self.written == self.out.len() {
            self.out.clear();
            self.out.shrink_to(BUFFER_KEPT_BYTES);
            self.written = 0;
            std::mem::swap(&mut self.out, &mut state.out);
        }
        Ok(state.closing)
    }

    fn file(&mut self) -> Result<(), ClientError> {
        let reader = &mut self.reader;
        self.shared
            .file(std::iter::from_fn(|| -> Option<Result<Frame, ProtocolError>> { reader.cut().transpose() }))
    }

    /// When to look whether the daemon is silent: never while no request is open, because then it has nothing to say.
    fn next_check(&mut self) -> Option<Instant> {
        let waiting = self.shared.state().inbox.open_count() > 0;
        if waiting && !self.waiting {
            self.watch.begin(Instant::now());
        } else if !waiting && self.waiting {
            self.watch.end();
        }
        self.waiting = waiting;
        if waiting { self.watch.next_check() } else { None }
    }

    /// Pings a silent daemon, or gives it up.
    fn silent(&mut self) -> Result<(), ClientError> {
        let now = Instant::now();
        match self.watch.due(now) {
            Due::Nothing => Ok(()),
            Due::GiveUp(silence) => Err(ClientError::Silent { waited_ms: milliseconds(silence) }),
            Due::Ping => {
                let mut state = self.shared.state();
                if state.inbox.is_open(self.ping_stream) {
                    return Ok(()); // one that is still unanswered asks the same
                }
                if state.inbox.open_count() >= self.shared.hello.limits.max_streams as usize {
                    // One stream more would break the protocol. Without a ping, silence proves nothing.
                    self.watch.heard(now);
                    return Ok(());
                }
                self.ping_stream = self.shared.append(&mut state, Op::Ping, &PingRequest::default(), None)?;
                state.inbox.abandon(self.ping_stream);
                Ok(())
            }
        }
    }
}
