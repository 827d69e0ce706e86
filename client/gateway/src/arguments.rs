//! Arguments and help texts.

use std::path::PathBuf;

use clap::{CommandFactory, Parser};
use rocmforge_client::{Options, SOCKET_VARIABLE};

use crate::aliases::Alias;
use crate::listen::{Address, DEFAULT_ADDRESS};

const AFTER: &str = "\
Served paths:
  OpenAI     GET /v1/models, POST /v1/chat/completions, POST /v1/completions,
             POST /v1/embeddings, POST /v1/rerank, POST /v1/responses, GET and DELETE /v1/responses/ID
  Anthropic  POST /v1/messages, POST /v1/messages/count_tokens
  Ollama     GET /api/tags, /api/ps, /api/version, POST /api/show, /api/chat, /api/generate,
             /api/embed, /api/embeddings
  its own    GET /health: 200 if requests are answered, 503 with the reason if not (for routers)
             GET /livez: 200 while this program runs
             GET /metrics (for Prometheus), with the numbers that routers ask vLLM's server for

A field of a request that cannot be honoured is refused by its name, unless its value changes
nothing. A client that hangs up cancels its request.

Examples:
  rocmforge-gateway
  rocmforge-gateway --listen unix:/run/user/1000/gateway.sock
  rocmforge-gateway --alias gpt-4o=qwen3-8b-q4_k_m --alias '*=smollm2-135m-instruct-q4_1'
  rocmforge-gateway --listen 0.0.0.0:8080 --token-file /etc/rocmforge/tokens
  curl http://127.0.0.1:11435/v1/models
  curl http://127.0.0.1:11435/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{\"model\": \"smollm2-135m-instruct-q4_1\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'

Exit codes:
  0    ended by SIGTERM or SIGINT; open answers had --drain-s to end
  1    the system refused an operation
  2    the arguments are invalid, or the gateway does not listen at that address";

/// Serves the rocmforged inference daemon's models over HTTP, in the APIs that other tools speak
#[derive(Clone, Debug, Parser)]
#[command(name = "rocmforge-gateway", version, after_help = AFTER, max_term_width = 100)]
pub struct Arguments {
    /// Listen at IP:PORT, or at unix:/path; addresses other than loopback ones need --token-file. A socket that systemd
    /// passes goes first
    #[arg(long, value_name = "ADDRESS", default_value = DEFAULT_ADDRESS)]
    pub listen: Address,
    /// Serve only requests that carry a token of this file, which has one a line. If the daemon's policy.subordinates lets the
    /// gateway act for users, each token is one of them; white space and a number behind it say which
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Serve MODEL under this name too; `*=MODEL` serves it under all names that no model has, and where none is named
    #[arg(long, value_name = "NAME=MODEL")]
    pub alias: Vec<Alias>,
    /// The daemon's socket [default: your own daemon's, $XDG_RUNTIME_DIR/rocmforge/api.sock, if it exists, else
    /// /run/rocmforge/api.sock]
    #[arg(long, env = SOCKET_VARIABLE, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Trust only a daemon of this uid, instead of root, the user rocmforge and you
    #[arg(long, value_name = "UID")]
    pub server_uid: Vec<u32>,
    /// Most MiB of a request's body
    #[arg(long, value_name = "MIB", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub body_mib: u32,
    /// Most open HTTP connections. If there are so many, a new one takes the place of the one that has waited longest for a
    /// request. If all have one under way, it waits. Tokens, or users of a Unix socket, may each have as many requests under
    /// way as would then still be possible
    #[arg(long, value_name = "COUNT", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub connections: u32,
    /// After SIGTERM, answer for so many seconds as before, while /health says 503: for routers that need time to notice
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=3600))]
    pub notice_s: u32,
    /// Then refuse requests, and leave so many seconds to running answers; a second signal ends them at once
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=86_400))]
    pub drain_s: u32,
    /// Serve /metrics without a token, for routers that send none; it names models and counts requests
    #[arg(long)]
    pub open_metrics: bool,
}

impl Arguments {
    /// The client options of these arguments.
    pub fn options(&self) -> Options {
        let mut options = Options {
            client_name: concat!("rocmforge-gateway/", env!("CARGO_PKG_VERSION")).to_owned(),
            ..Options::default()
        };
        options.set_server(self.socket.as_deref(), &self.server_uid);
        options
    }
}

/// The definition of the command line; xtask builds the manual page and completions from it.
pub fn command() -> clap::Command {
    Arguments::command()
}
