//! `rocmforge-client`: the daemon's command line. Reads arguments, asks the daemon, prints the answer.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
