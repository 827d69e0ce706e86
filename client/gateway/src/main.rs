//! `rocmforge-gateway`: the HTTP door to the daemon.

use std::process::ExitCode;

fn main() -> ExitCode {
    rocmforge_gateway::main(std::env::args_os())
}
