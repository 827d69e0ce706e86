//! `rocmforged`: parses arguments, starts the log, reads the configuration; the library does the rest.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use rocmforge::aside::processes;
use rocmforge::backend::doctor;
use rocmforge::daemon::arguments::Arguments;
use rocmforge::daemon::{self, ConfigSource, DaemonError, Start};
use rocmforge::model::template;

fn main() -> ExitCode {
    // Fails for no valid set. Started by the daemon's thread for it, this process would take no signal.
    let _ = processes::take_signals();
    // Must be first: this process renders one template only, and permanently restricts its files, memory and time.
    if std::env::args_os().nth(1).is_some_and(|argument| argument == template::SUBCOMMAND) {
        return template::child_main();
    }
    // A separate process, so that a GPU runtime that hangs or aborts takes down only this one.
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
    // A file that passes the check is one that a reload takes too.
    let read = if arguments.check_config { source.reload() } else { source.load() };
    daemon::logging::start(&read.as_ref().map(|(config, _)| config.log.clone()).unwrap_or_default());
    let (config, origins) = read?;
    if arguments.check_config {
        daemon::directories::check(&config.models).map_err(|error| origins.name(error))?;
        // A closed standard output is no reason to fail.
        let _ = writeln!(std::io::stdout(), "the configuration is valid: {origins}");
        return Ok(());
    }
    tracing::info!(files = %origins, "configuration read");
    daemon::allocator::keep_little();
    // Files that the daemon creates are private; the socket's mode is set separately.
    rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
    raise_descriptor_limit();
    // Before the first client: see there.
    if let Err(error) = processes::prepare() {
        tracing::error!(%error, "no program can be started: chat templates and the doctor will fail");
    }
    let inherited = daemon::inherited::descriptors()?;
    let backend = daemon::device::factory(&config);
    daemon::run(Start { config, source, inherited }, backend)
}

/// Makes command-line paths absolute: they are relative to the caller's directory.
fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

/// Raises the soft limit of descriptors to the hard one. Every connection and model takes a descriptor; the usual soft
/// limit of 1024 exists for programs that use select(2).
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "raising the limit of open files failed");
    }
}
