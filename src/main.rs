//! `rocmforged`: parses arguments, starts the log, reads the configuration; the library does the rest.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use rocmforge::aside::processes;
use rocmforge::backend::doctor;
use rocmforge::config::{Config, ConfigError};
use rocmforge::daemon::arguments::Arguments;
use rocmforge::daemon::{self, ConfigSource, DaemonError, Start, directories};
use rocmforge::model::{constraint, template};
use rocmforge::socket::tell_waiting;

fn main() -> ExitCode {
    // Fails for no valid set. Started by the daemon's thread for it, this process would take no signal.
    let _ = processes::take_signals();
    // Must be first: this process renders one template only, and permanently restricts its files, memory and time.
    if std::env::args_os().nth(1).is_some_and(|argument| argument == template::SUBCOMMAND) {
        return template::child_main();
    }
    // The same for a constraint of answers.
    if std::env::args_os().nth(1).is_some_and(|argument| argument == constraint::SUBCOMMAND) {
        return constraint::child_main();
    }
    // A separate process, so that a GPU runtime that hangs or aborts takes down only this one.
    if std::env::args_os().nth(1).is_some_and(|argument| argument == doctor::SUBCOMMAND) {
        return doctor::child_main();
    }
    let arguments = Arguments::parse();
    let mut listener = None;
    match serve(arguments, &mut listener) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            if let Some(listener) = listener.filter(|_| error.is_for_a_person()) {
                tell_clients(&error, listener);
            }
            ExitCode::from(error.exit_status())
        }
    }
}

/// Serves until the end. `listener` gets systemd's socket, for the case that nobody will be served.
fn serve(arguments: Arguments, listener: &mut Option<OwnedFd>) -> Result<(), DaemonError> {
    let source = ConfigSource {
        file: arguments.config,
        socket: arguments.socket.map(absolute),
        models: arguments.models.into_iter().map(absolute).collect(),
    };
    // A file that passes the check is one that a reload takes too.
    let read = if arguments.check_config { source.reload() } else { source.load() };
    daemon::logging::start(&read.as_ref().map(|(config, _)| config.log.clone()).unwrap_or_default());
    let (config, origins) = match read {
        Ok(read) => read,
        Err(error) if arguments.check_config => return Err(error.into()),
        Err(error) => {
            *listener = daemon::inherited::descriptors().ok().and_then(|inherited| inherited.listener);
            return Err(error.into());
        }
    };
    if arguments.check_config {
        return check(&config).map_err(|error| origins.name(error).into()).map(|served| {
            // A closed standard output is no reason to fail.
            let _ = writeln!(std::io::stdout(), "the configuration is valid: {origins}; {served}");
        });
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
    *listener = inherited.listener.as_ref().and_then(|listener| listener.try_clone().ok());
    daemon::run(Start { config, source, inherited }, backend)
}

/// Tells the clients for which systemd started the daemon why it does not serve.
fn tell_clients(error: &DaemonError, listener: OwnedFd) {
    let why = format!("rocmforged cannot start: {error}; mend that and restart rocmforged");
    // A notice is one line.
    let line = why.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Status(&line)]) {
        tracing::warn!(%error, "the service manager cannot be told");
    }
    match tell_waiting(listener, &why) {
        Ok(0) => {}
        Ok(clients) => tracing::info!(clients, "told waiting clients why the daemon does not serve"),
        Err(error) => tracing::warn!(%error, "waiting clients could not be told"),
    }
}

/// Checks that a configuration would serve models, and warns of those that it would not. Returns the number that it would.
fn check(config: &Config) -> Result<String, ConfigError> {
    directories::check(&config.models)?;
    let refuses = daemon::device::refuses(config.device.backend);
    let survey = directories::survey(&config.models, directories::CHECK_PATIENCE, Box::new(refuses));
    for warning in directories::judge(config, survey.as_ref())? {
        // Not to the log, which may keep warnings back.
        let _ = writeln!(std::io::stderr(), "warning: {warning}");
    }
    let survey = survey.unwrap_or_default();
    let all = survey.served.len() + survey.unserved.len() + survey.unseen.len();
    Ok(format!("{} of {all} models would be served", survey.served.len()))
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
