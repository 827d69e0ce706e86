//! The HTTP door to the `rocmforged` daemon: a client of its socket like any other, which answers in the APIs that other
//! tools speak.
//!
//! [`serve`] accepts connections, `routes` reads a request and finds its API. Each API has a module that reads the fields
//! of its requests and writes its answers. `generation` runs an answer in the daemon, for all of them. HTTP is on this
//! side only: the daemon owns no network.

mod access;
mod aliases;
mod anthropic;
mod api;
mod arguments;
mod chat;
mod clock;
mod embeddings;
mod ending;
mod events;
mod failure;
mod generation;
mod host;
mod inherited;
mod kept;
mod life;
mod listen;
mod load;
mod metrics;
mod models;
mod ollama;
mod openai;
mod params;
mod places;
mod reply;
mod rerank;
mod routes;
mod serve;
mod steering;
mod thinking;
mod token_texts;
mod users;

use std::ffi::OsString;
use std::io::{self, Write};
use std::ops::Deref;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use rocmforge_client::Options;
use rocmforge_client::asynchronous::Client;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, oneshot};

use access::Identity;
pub use access::{Access, Tokens};
pub use aliases::{Alias, Aliases};
pub use arguments::{Arguments, command};
use failure::Failure;
pub use listen::{Address, Listener};
pub use serve::serve;

/// The system refused an operation.
const EXIT_FAILED: u8 = 1;
/// The arguments are invalid, or the gateway does not listen at that address.
const EXIT_USAGE: u8 = 2;

/// Threads that serve sockets: one request's large body then keeps no other one waiting.
const THREADS: usize = 2;

/// Most connections to the daemon for one of its users: 16 of them carry a thousand requests.
const DAEMON_CONNECTIONS_MAX: usize = 16;

/// Bytes of large bodies that are read, or are JSON values, at once. Texts take as much as JSON values; `params` bounds the
/// number of others.
const BODIES_BYTES: usize = 64 << 20;

/// The bounds of a gateway.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Most bytes of a request's body.
    pub body_bytes: usize,
    /// Most open HTTP connections.
    pub connections: usize,
    /// Other names for models.
    pub aliases: Aliases,
    /// Time in which a gateway that stops still answers requests, so that routers notice.
    pub notice: Duration,
    /// Time for running answers to end after that.
    pub drain: Duration,
    /// `/metrics` needs no token.
    pub open_metrics: bool,
    /// Time for the head of a request: from its first byte, or from the connection's start.
    pub head: Duration,
    /// Time in which a connection may rest after an answer, where nobody needs its place.
    pub idle: Duration,
}

/// Time for running answers of a gateway that stops.
const DRAIN: Duration = Duration::from_secs(10);

/// Time for the head of a request.
const HEAD: Duration = Duration::from_secs(10);

/// Time between two requests of a connection: longer than clients and routers usually keep an unused one.
const IDLE: Duration = Duration::from_secs(75);

impl Default for Settings {
    fn default() -> Self {
        Self {
            body_bytes: 8 << 20,
            connections: 1024,
            aliases: Aliases::default(),
            notice: Duration::ZERO,
            drain: DRAIN,
            open_metrics: false,
            head: HEAD,
            idle: IDLE,
        }
    }
}

/// The gateway as one caller has it: the state that all share, and connections to the daemon that count for the caller's user.
#[derive(Debug)]
pub struct Gateway {
    client: Arc<Client>,
    shared: Arc<Shared>,
}

/// The state that all connections share.
#[derive(Debug)]
pub struct Shared {
    /// The gateway's own user of the daemon, and all that it acts for.
    client: Arc<Client>,
    users: users::Users,
    metrics: metrics::Metrics,
    /// The daemon's latest replies about its load.
    load: load::Load,
    ending: ending::Ending,
    settings: Settings,
    /// Room for large bodies, in KiB.
    bodies: Arc<Semaphore>,
    /// Answers that later requests go on with.
    kept: kept::Kept,
}

impl Deref for Gateway {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

impl Gateway {
    /// A gateway to the daemon at those options; it connects at the first request.
    pub fn new(options: Options, settings: Settings) -> Arc<Self> {
        let client = Arc::new(Client::new(options.clone(), DAEMON_CONNECTIONS_MAX));
        let bodies = Semaphore::new(settings.body_bytes.max(BODIES_BYTES).div_ceil(1024));
        let shared = Shared {
            client: Arc::clone(&client),
            users: users::Users::new(options),
            metrics: metrics::Metrics::default(),
            load: load::Load::default(),
            ending: ending::Ending::default(),
            settings,
            bodies: Arc::new(bodies),
            kept: kept::Kept::default(),
        };
        Arc::new(Self { client, shared: Arc::new(shared) })
    }

    /// The gateway as this caller has it.
    ///
    /// # Errors
    /// As [`users::Users::client`].
    async fn of(self: &Arc<Self>, access: &Access, caller: Identity) -> Result<Arc<Self>, Failure> {
        let client = self.users.client(&self.shared.client, access, caller).await?;
        Ok(client.map_or_else(
            || Arc::clone(self),
            |client| Arc::new(Self { client, shared: Arc::clone(&self.shared) }),
        ))
    }

    fn body_bytes_max(&self) -> u64 {
        self.settings.body_bytes as u64
    }
}

/// The whole program; `--help` documents the exit codes.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => error.exit(),
    };
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err((code, reason)) => {
            // If even standard error cannot be written, the exit code must do.
            let _ = writeln!(io::stderr(), "rocmforge-gateway: {reason}");
            ExitCode::from(code)
        }
    }
}

/// Serves until a signal ends it.
fn run(arguments: &Arguments) -> Result<(), (u8, String)> {
    let usage = |reason: String| (EXIT_USAGE, reason);
    let system = |error: io::Error| (EXIT_FAILED, error.to_string());
    let inherited = inherited::socket().map_err(usage)?;
    let tokens = arguments.token_file.as_deref().map(Tokens::read).transpose().map_err(usage)?;
    let options = arguments.options();
    options.check().map_err(|error| usage(error.to_string()))?;
    let settings = Settings {
        body_bytes: (arguments.body_mib as usize) << 20,
        connections: arguments.connections as usize,
        aliases: arguments.alias.iter().cloned().collect(),
        notice: Duration::from_secs(arguments.notice_s.into()),
        drain: Duration::from_secs(arguments.drain_s.into()),
        open_metrics: arguments.open_metrics,
        ..Settings::default()
    };
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(THREADS).enable_all().build().map_err(system)?;
    runtime.block_on(async {
        let listener = match inherited {
            Some(socket) => Listener::inherited(socket, tokens),
            None => Listener::open(&arguments.listen, tokens),
        };
        let listener = listener.map_err(usage)?;
        let (mut term, mut int) = (
            signal(SignalKind::terminate()).map_err(system)?,
            signal(SignalKind::interrupt()).map_err(system)?,
        );
        // Told once a signal would be heard.
        eprintln!("rocmforge-gateway: serving {} at {}", options.socket.display(), listener.address());
        let mut signalled = async || tokio::select! { _ = term.recv() => {} _ = int.recv() => {} };
        let (stop, stopped) = oneshot::channel::<()>();
        let signals = async {
            signalled().await;
            drop(stop);
            signalled().await;
        };
        let stopped = async { drop(stopped.await) };
        tokio::select! {
            () = serve(Gateway::new(options, settings), listener, stopped) => {}
            // A second signal ends answers that the first one left.
            () = signals => {}
        }
        Ok(())
    })
}
