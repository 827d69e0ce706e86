//! The log: text or JSON lines on standard error, or journal entries with fields if standard error goes to the journal.
//! It never contains prompts or answers.

use std::io::IsTerminal;

use tracing_subscriber::Layer;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use super::journal::Journal;
use crate::config::{Log, LogFormat, LogLevel};

/// Sends log messages and panics to standard error, or to the journal behind it. Later calls do nothing.
pub fn start(log: &Log) {
    let level = match log.level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    if log.format == LogFormat::Text
        && let Some(journal) = Journal::of_stderr()
    {
        let _ = tracing_subscriber::registry().with(journal.with_filter(level)).try_init();
    } else {
        let builder = tracing_subscriber::fmt()
            .with_max_level(level)
            .with_writer(std::io::stderr)
            .with_target(false)
            // Reporting these would write to standard error and end the process if that fails: a full disk must not
            // stop the daemon.
            .log_internal_errors(false)
            .with_ansi(std::io::stderr().is_terminal());
        let _ = match log.format {
            LogFormat::Json => builder.json().try_init(),
            LogFormat::Text => builder.try_init(),
        };
    }
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let payload = panic.payload();
        let text = payload.downcast_ref::<&str>().copied();
        let message =
            text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
        tracing::error!(place, message, "a panic: a bug in this program");
    }));
}
