//! Arguments and help texts.

use std::path::PathBuf;
use std::time::Duration;

use clap::{CommandFactory, Parser};
use rocmforge_client::{Options, SOCKET_VARIABLE};

const AFTER: &str = "\
Keys:
  q, Ctrl-C         end
  up, down, j, k    select a model; page up and down, home and end move faster
  Enter             show all parts and rules of the selected model, or hide them
  s                 sort models by another column
  ?, h              help

Letters for a device's memory: A, B, C ... models' weights, k KV, a activations, s staging of loads, g recorded graphs,
+ kept for the next allocation, o other programs, . free, | end of the budget. Letters for a model's parts (the embedding, each
layer, the head): # resident, - partly resident, > loading, . absent.

Examples:
  rocmforge-top
  rocmforge-top --once | head -5
  rocmforge-top --once --interval 5
  rocmforge-top --json --interval 10 >> /tmp/daemon.jsonl
  rocmforge-top --json --once | jq '.devices[0].rates.tokens_per_second'

Exit codes:
  0    ended by q, or all was printed; also when the reader of the output closed it
  1    a request or the terminal failed, or the system gave this program no thread
  2    the arguments are invalid
  3    the daemon cannot be reached at the start, or is not trusted
  130  ended by Ctrl-C; 143 by SIGTERM, 129 by SIGHUP

If the daemon stops later, the view waits until it is back.";

/// Shows what the rocmforged inference daemon is doing, live
#[derive(Clone, Debug, Parser)]
#[command(name = "rocmforge-top", version, after_help = AFTER, max_term_width = 100)]
pub struct Arguments {
    /// The daemon's socket [default: your own daemon's, $XDG_RUNTIME_DIR/rocmforge/api.sock, if it exists, else
    /// /run/rocmforge/api.sock]
    #[arg(long, env = SOCKET_VARIABLE, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Trust only a daemon of this uid, instead of root, the user rocmforge and you
    #[arg(long, value_name = "UID")]
    pub server_uid: Vec<u32>,
    /// Seconds between two samples, 0.1 to 3600
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    pub interval: Duration,
    /// Print one frame as text after one interval, and exit; the default if standard output is not a terminal
    #[arg(long)]
    pub once: bool,
    /// Print one JSON object per line and interval; with `--once`, a single one
    #[arg(long)]
    pub json: bool,
}

impl Arguments {
    /// The client options of these arguments.
    pub fn options(&self) -> Options {
        let mut options = Options {
            client_name: concat!("rocmforge-top/", env!("CARGO_PKG_VERSION")).to_owned(),
            // A daemon that is gone must show as gone at once; the next sample asks it again.
            retry_timeout: Duration::ZERO,
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

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    if (0.1..=3600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(format!("{seconds} is not in 0.1..=3600"))
    }
}
