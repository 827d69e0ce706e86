//! `rocmforge-client`: the daemon's command line. Reads arguments, asks the daemon, prints the answer.

use std::process::ExitCode;

fn main() -> ExitCode {
    rocmforge_client::cli::main()
}
