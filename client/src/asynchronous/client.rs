//! A client with several connections, because one connection bounds its open requests.

use std::time::Instant;

use tokio::sync::Mutex;

use super::connection::{Connection, Generation};
use crate::embedding::Embedding;
use crate::error::ClientError;
use crate::options::Options;
use crate::relevance::Relevance;
use crate::wire::{Call, GenerateEnd, GenerateItem, GenerateRequest};

/// Attempts to open a request where other tasks take the streams that were free a moment ago.
const ATTEMPTS: usize = 8;

/// A client of one daemon. It connects when needed, and again after a restart.
#[derive(Debug)]
pub struct Client {
    options: Options,
    connections_max: usize,
    pool: Mutex<Pool>,
}

#[derive(Debug, Default)]
struct Pool {
    connections: Vec<Connection>,
    /// When the last attempt to connect failed, and why.
    failed: Option<(Instant, ClientError)>,
}

impl Client {
    /// Creates a client with at most so many connections, at least one; it connects at the first request.
    pub fn new(options: Options, connections_max: usize) -> Self {
        Self { options, connections_max: connections_max.max(1), pool: Mutex::default() }
    }

    /// A connection with a free stream; connects if there is none.
    ///
    /// # Errors
    /// As [`Connection::connect`], and [`ClientError::TooManyStreams`] when all connections are full.
    pub async fn connection(&self) -> Result<Connection, ClientError> {
        let asked = Instant::now();
        let mut pool = self.pool.lock().await;
        pool.connections.retain(Connection::is_alive);
        if let Some(connection) = pool.connections.iter().find(|one| one.free_streams() > 0) {
            return Ok(connection.clone());
        }
        if pool.connections.len() >= self.connections_max {
            let max: usize =
                pool.connections.iter().map(|one| one.hello().limits.max_streams as usize - 1).sum();
            return Err(ClientError::TooManyStreams { max: u32::try_from(max).unwrap_or(u32::MAX) });
        }
        // The attempt of another task that ended while this one waited is as good as its own.
        if let Some((_, error)) = pool.failed.as_ref().filter(|(ended, _)| *ended >= asked) {
            return Err(error.clone());
        }
        match Connection::connect(&self.options).await {
            Ok(connection) => {
                pool.failed = None;
                pool.connections.push(connection.clone());
                Ok(connection)
            }
            Err(error) => {
                pool.failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    /// Sends a request and waits for its reply. If the connection ended or the daemon is stopping, it is repeated once on
    /// another connection: each request with one reply may be repeated safely.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub async fn call<C: Call>(&self, request: &C) -> Result<C::Reply, ClientError> {
        let mut again = true;
        loop {
            let connection = self.connection().await?;
            match connection.call(request).await {
                Err(error) if error.is_unreachable() => {
                    self.leave(&connection).await;
                    if !error.is_worth_repeating() || !std::mem::take(&mut again) {
                        return Err(error);
                    }
                }
                outcome => return outcome,
            }
        }
    }

    /// Starts a generation. It is not repeated once it was sent.
    ///
    /// # Errors
    /// As [`Client::connection`], and the sending errors of [`Connection::call`].
    pub async fn generate(&self, request: &GenerateRequest) -> Result<Generation, ClientError> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            match self.connection().await?.generate(request) {
                Err(ClientError::TooManyStreams { .. }) if attempts < ATTEMPTS => {}
                outcome => return outcome,
            }
        }
    }

    /// The embedding of the request's prompt, normalised and pooled as the model's file says unless the request states
    /// [other options](GenerateRequest::with_embedding). Sampling options count for nothing.
    ///
    /// # Errors
    /// As [`Client::generate`], and errors of the daemon.
    pub async fn embed(&self, request: &GenerateRequest) -> Result<Embedding, ClientError> {
        let (items, end) = self.collected(&Embedding::request(request)).await?;
        Embedding::of(items, end.as_ref())
    }

    /// How relevant the request's [document](GenerateRequest::with_document) is to its prompt.
    ///
    /// # Errors
    /// As [`Client::generate`], and errors of the daemon.
    pub async fn rank(&self, request: &GenerateRequest) -> Result<Relevance, ClientError> {
        let (items, end) = self.collected(request).await?;
        Relevance::of(items, end.as_ref())
    }

    /// All items of a request, and its end.
    async fn collected(
        &self,
        request: &GenerateRequest,
    ) -> Result<(Vec<GenerateItem>, Option<GenerateEnd>), ClientError> {
        let mut generation = self.generate(request).await?;
        let mut items = Vec::new();
        loop {
            match generation.next_item().await {
                Ok(Some(item)) => items.push(item),
                Ok(None) => return Ok((items, generation.end().cloned())),
                Err(error) => {
                    if error.is_unreachable() {
                        self.leave(generation.connection()).await;
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Takes a connection out of use: a stopping daemon keeps its connections open, so later requests need a new one.
    /// Requests on it go on.
    pub async fn leave(&self, connection: &Connection) {
        self.pool.lock().await.connections.retain(|one| !one.is(connection));
    }
}
