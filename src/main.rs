//! `rocmforged`: arguments, log, configuration; the rest is the library's.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use rocmforge::backend::doctor;
use rocmforge::daemon::arguments::Arguments;
use rocmforge::daemon::{self, ConfigSource, DaemonError, Start};
use rocmforge::model::template;

fn main() -> ExitCode {
    // Before anything else: this process is for one template only, and gives up files, memory and time for good.
    if std::env::args_os().nth(1).is_some_and(|argument| argument == template::SUBCOMMAND) {
        return template::child_main();
    }
    // A GPU's runtime that hangs or aborts takes this process with it and no other.
    if std::env::args_os().nth(1).is_some_and(|argument| argument == doctor::SUBCOMMAND) {
        return doctor::child_main();
    }
    let arguments = Arguments::parse();
    match serve(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::from(error.exit_status())
        }
    }
}

fn serve(arguments: Arguments) -> Result<(), DaemonError> {
    let source = ConfigSource {
        file: arguments.config,
        socket: arguments.socket.map(absolute),
        models: arguments.models.into_iter().map(absolute).collect(),
    };
    let config = source.load();
    daemon::logging::start(&config.as_ref().map(|config| config.log.clone()).unwrap_or_default());
    let config = config?;
    if arguments.check_config {
        // Nobody there to read it is no reason to fail.
        let _ = writeln!(std::io::stdout(), "the configuration is valid");
        return Ok(());
    }
    daemon::allocator::keep_little();
    // What the daemon creates is its own; the socket's mode is set apart.
    rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
    raise_descriptor_limit();
    let inherited = daemon::inherited::descriptors()?;
    let backend = daemon::device::factory(&config);
    daemon::run(Start { config, source, inherited }, backend)
}

/// Paths on the command line are the caller's, so they start where the caller is.
fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

/// Every connection and every model takes a descriptor; the usual soft limit of 1024 is for programs that use select(2).
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}
