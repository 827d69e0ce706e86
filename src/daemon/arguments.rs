//! The daemon's command line and help texts.

use std::path::PathBuf;

use clap::{CommandFactory, Parser};

const EXIT_CODES: &str = "\
Exit status: 0 stopped as asked, 2 wrong arguments, 69 the socket is in use or cannot be opened, 70 the engine hung \
when stopping or lost its device, 71 the system or the device refused an operation, 78 the configuration is wrong, 130 a second \
signal stopped the daemon at once.

Signals: TERM and INT stop the daemon (running answers finish first, see limits.drain_s); HUP reads the configuration \
again and looks for models.";

/// Keeps GGUF models mapped and answers local programs over one Unix socket.
#[derive(Debug, Parser)]
#[command(name = "rocmforged", version, after_help = EXIT_CODES)]
pub struct Arguments {
    /// Listen on this path (unless systemd passes a socket)
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Serve the *.gguf files of this directory; may be given several times
    #[arg(long, value_name = "DIR", num_args = 1..)]
    pub models: Vec<PathBuf>,
    /// Read settings from this TOML file, then from conf.d/*.toml beside it; --socket and --models take precedence
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check the configuration and its models' headers, warn of models that would not be served, and exit. An empty file is
    /// refused, and models of which none would be served, as a reload refuses them
    #[arg(long)]
    pub check_config: bool,
}

/// The command line's definition, for its manual page and completions.
pub fn command() -> clap::Command {
    Arguments::command()
}
