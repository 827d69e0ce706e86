//! `rocmforge-top`: a terminal view of the daemon.

use std::process::ExitCode;

fn main() -> ExitCode {
    rocmforge_top::main(std::env::args_os())
}
