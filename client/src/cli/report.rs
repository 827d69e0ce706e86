//! Prints answers and errors, and sets the exit code.

use std::io::{self, Write};
use std::process::ExitCode;

use rocmforge_client::wire::{ErrorClass, ErrorCode, WireError};
use rocmforge_client::{ClientError, printable};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::Status;

const EXIT_FAILED: u8 = 1;
const EXIT_USAGE: u8 = 2;
const EXIT_UNAVAILABLE: u8 = 3;
const EXIT_MODEL: u8 = 4;
/// 128 + SIGINT: a shell reports this for a program that Ctrl-C ended.
pub const EXIT_CANCELLED: u8 = 130;

/// Why the program fails.
#[derive(Debug)]
pub enum Failure {
    /// The arguments are invalid.
    Usage(String),
    /// The input is larger than a request can hold.
    TooLong(String),
    /// The client or the daemon returned an error.
    Client(Box<ClientError>),
    /// A file could not be written.
    File(String),
    /// A model could not be fetched.
    #[cfg(feature = "pull")]
    Pull(Box<super::pull::PullError>),
    /// Standard output could not be written.
    Output(io::Error),
    /// The system gave this process no thread or no descriptor.
    Resources(String),
    /// Requests of a benchmark failed; its figures were printed.
    Requests(String),
}

impl Failure {
    pub fn usage(message: &str) -> Self {
        Self::Usage(message.to_owned())
    }

    fn exit_code(&self) -> u8 {
        const CANCELLED: u16 = ErrorCode::Cancelled as u16;
        let error = match self {
            Self::Usage(_) => return EXIT_USAGE,
            #[cfg(feature = "pull")]
            Self::Pull(error) if error.is_usage() => return EXIT_USAGE,
            #[cfg(feature = "pull")]
            Self::Pull(_) => return EXIT_FAILED,
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => return 0,
            Self::Output(_) | Self::File(_) | Self::TooLong(_) | Self::Resources(_) | Self::Requests(_) => {
                return EXIT_FAILED;
            }
            Self::Client(error) => error,
        };
        match **error {
            ClientError::Server(WireError { code: CANCELLED, .. }) => EXIT_CANCELLED,
            ClientError::File { .. } => EXIT_MODEL,
            ClientError::PermissionDenied { .. }
            | ClientError::UntrustedServer { .. }
            | ClientError::UnsupportedVersion { .. }
            | ClientError::Refused { .. }
            | ClientError::CannotAct
            | ClientError::Timeout { .. } => EXIT_UNAVAILABLE,
            _ if error.is_unreachable() => EXIT_UNAVAILABLE,
            _ if error.code().and_then(ErrorClass::of) == Some(ErrorClass::Model) => EXIT_MODEL,
            _ => EXIT_FAILED,
        }
    }

    /// The value of the field `error`.
    fn to_json(&self) -> Value {
        let (name, code) = match self {
            Self::Usage(_) => ("Usage", None),
            Self::TooLong(_) => (ErrorCode::LimitExceeded.name(), Some(ErrorCode::LimitExceeded as u16)),
            Self::Client(error) => (error.code_name(), error.code()),
            Self::File(_) => ("File", None),
            #[cfg(feature = "pull")]
            Self::Pull(error) => (error.name(), None),
            Self::Output(_) => ("Output", None),
            Self::Resources(_) => ("Resources", None),
            Self::Requests(_) => ("RequestsFailed", None),
        };
        let client = match self {
            Self::Client(error) => Some(&**error),
            _ => None,
        };
        let entries = match client {
            Some(ClientError::Server(error)) => error.detail.as_slice(),
            _ => &[],
        };
        let detail: Map<_, _> =
            entries.iter().map(|entry| (entry.key.clone(), Value::from(entry.value.clone()))).collect();
        json!({
            "name": name,
            "code": code,
            "message": self.to_string(),
            "retryable": client.is_some_and(ClientError::is_retryable),
            "retry_after_ms": client.map_or(0, ClientError::retry_after_ms),
            "detail": detail,
        })
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Usage(message)
            | Self::TooLong(message)
            | Self::File(message)
            | Self::Resources(message)
            | Self::Requests(message) => f.write_str(message),
            Self::Client(error) => match &**error {
                ClientError::Server(error) => f.write_str(&error.message),
                error => write!(f, "{error}"),
            },
            #[cfg(feature = "pull")]
            Self::Pull(error) => write!(f, "{error}"),
            Self::Output(error) => write!(f, "standard output: {error}"),
        }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::SocketPath { .. } => Self::Usage(error.to_string()),
            error => Self::Client(Box::new(error)),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

/// Output format: text or JSON.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    pub json: bool,
}

impl Output {
    /// Prints an answer, as JSON or through `text`.
    pub fn show<T: Serialize>(
        self,
        answer: &T,
        text: impl FnOnce(&mut dyn Write, &T) -> io::Result<()>,
    ) -> Result<(), Failure> {
        self.show_as(answer, |answer| serde_json::to_value(answer), text)
    }

    /// As [`Output::show`], with a JSON that has more than the answer's own fields.
    pub fn show_as<T>(
        self,
        answer: &T,
        json: impl FnOnce(&T) -> serde_json::Result<Value>,
        text: impl FnOnce(&mut dyn Write, &T) -> io::Result<()>,
    ) -> Result<(), Failure> {
        let mut stdout = io::BufWriter::new(io::stdout().lock());
        if self.json {
            let value = json(answer).map_err(io::Error::from)?;
            serde_json::to_writer(&mut stdout, &for_scripts(value)).map_err(io::Error::from)?;
            writeln!(stdout)?;
        } else {
            text(&mut stdout, answer)?;
        }
        Ok(stdout.flush()?)
    }

    /// Prints an error and returns its exit code. A closed output is not an error.
    pub fn fail(self, failure: &Failure) -> ExitCode {
        self.fail_with(failure, json!({}))
    }

    /// As [`Output::fail`]; with `--json`, the fields of `partial` (the partial answer) stand beside `error`.
    pub fn fail_with(self, failure: &Failure, mut partial: Value) -> ExitCode {
        let code = failure.exit_code();
        if code != 0 {
            let mut stderr = io::stderr().lock();
            // If even standard error cannot be written, the exit code must do.
            let _ = match (self.json, failure) {
                (true, _) => {
                    partial["error"] = failure.to_json();
                    writeln!(stderr, "{partial}")
                }
                (false, Failure::Client(error)) => {
                    writeln!(
                        stderr,
                        "rocmforge-client: {}: {}",
                        words(error.code_name()),
                        printable(&failure.to_string())
                    )
                }
                // Messages quote paths and arguments.
                (false, _) => writeln!(stderr, "rocmforge-client: {}", printable(&failure.to_string())),
            };
        }
        ExitCode::from(code)
    }
}

/// Writes over the line of progress on standard error. A terminal that is gone does not end the work.
pub fn show_progress(line: &str) {
    let _ = write!(io::stderr(), "\r\x1b[K{line}");
}

/// The wire's structures for scripts: without `more`, because lists are whole, without `ext`, and with states in
/// snake case.
pub fn for_scripts(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let keep = fields.into_iter().filter(|(key, _)| key != "ext" && key != "more");
            Value::Object(
                keep.map(|(key, value)| {
                    let value = match value {
                        Value::String(name)
                            if ["state", "wanted", "kind", "origin"].contains(&key.as_str()) =>
                        {
                            Value::from(snake_case(&name))
                        }
                        other => for_scripts(other),
                    };
                    (key, value)
                })
                .collect(),
            )
        }
        Value::Array(values) => values.into_iter().map(for_scripts).collect(),
        other => other,
    }
}

/// The status with `users`, and with `notes`: what the daemon says of itself and its devices in words, with names in
/// snake case.
pub fn status(Status { status: reply, users }: &Status) -> serde_json::Result<Value> {
    let notes = |notes: Vec<(&str, &str)>| {
        let entry = |(name, value): (&str, &str)| (name.replace(' ', "_"), Value::from(value));
        Value::Object(notes.into_iter().map(entry).collect())
    };
    let mut value = serde_json::to_value(reply)?;
    value["notes"] = notes(reply.notes());
    value["users"] = serde_json::to_value(users)?;
    for (user, value) in users.iter().zip(value["users"].as_array_mut().into_iter().flatten()) {
        value["sessions"] = user.sessions().into();
        value["session_bytes"] = user.session_bytes().into();
        value["passed_bytes"] = user.passed_bytes().into();
    }
    for (number, device) in reply.devices.iter().enumerate() {
        let value = &mut value["devices"][number];
        value["notes"] = notes(device.notes());
        value["kv_cached_bytes"] = device.kv_cached_bytes().into();
        value["states_used"] = device.states_used().into();
        value["states_cached"] = device.states_cached().into();
        value["states_cached_bytes"] = device.states_cached_bytes().into();
    }
    Ok(value)
}

/// `ModelNotFound` as `model not found`.
pub fn words(name: &str) -> String {
    snake_case(name).replace('_', " ")
}

/// `EndOfGeneration` as `end_of_generation`.
pub fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for c in name.chars() {
        if c.is_ascii_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.push(c.to_ascii_lowercase());
    }
    snake
}

#[cfg(test)]
mod tests {
    use rocmforge_client::wire::{
        DeviceStatus, EXT_DEVICE_STATES_CACHED, EXT_DEVICE_STATES_CACHED_BYTES, EXT_USER_SESSIONS,
        StatusReply, UserEntry, number_ext,
    };

    use super::*;

    #[test]
    fn exit_codes_follow_the_class() {
        let server = |code| Failure::from(ClientError::Server(WireError::new(code, "x"))).exit_code();
        assert_eq!(server(ErrorCode::ModelNotFound), EXIT_MODEL);
        assert_eq!(server(ErrorCode::Cancelled), EXIT_CANCELLED);
        assert_eq!(server(ErrorCode::ServerDraining), EXIT_UNAVAILABLE);
        assert_eq!(server(ErrorCode::Busy), EXIT_FAILED);
        assert_eq!(server(ErrorCode::PromptTooLong), EXIT_FAILED);
        assert_eq!(Failure::usage("x").exit_code(), EXIT_USAGE);
        assert_eq!(Failure::from(io::Error::from(io::ErrorKind::BrokenPipe)).exit_code(), 0);
    }

    #[test]
    fn scripts_see_what_the_daemon_says_in_words() {
        let notes = [("you may", "run\tand load".to_owned())];
        let device = [("upload", "ring".to_owned())];
        let mut ext = DeviceStatus::notes_ext(device.into_iter());
        let cached = [(EXT_DEVICE_STATES_CACHED, 3), (EXT_DEVICE_STATES_CACHED_BYTES, 150)];
        ext.extend(number_ext(cached));
        let device = DeviceStatus { ext, ..DeviceStatus::default() };
        let reply = StatusReply {
            devices: vec![device],
            ext: StatusReply::notes_ext(notes.into_iter()),
            ..StatusReply::default()
        };
        let ext = number_ext([(EXT_USER_SESSIONS, 2)]);
        let users = vec![UserEntry { uid: 7, kv_pages: 3, ext, ..UserEntry::default() }];
        let value = for_scripts(status(&Status { status: reply, users }).unwrap());
        assert_eq!((&value["users"][0]["kv_pages"], value["users"][0].get("ext")), (&json!(3), None));
        assert_eq!(
            (&value["users"][0]["sessions"], &value["users"][0]["session_bytes"]),
            (&json!(2), &json!(0))
        );
        assert_eq!(value["notes"], json!({ "you_may": "run and load" }));
        let device = &value["devices"][0];
        assert_eq!(device["notes"], json!({ "upload": "ring" }));
        let states = ["states_used", "states_cached", "states_cached_bytes"].map(|key| device[key].clone());
        assert_eq!(states, [json!(0), json!(3), json!(150)]);
    }

    #[test]
    fn scripts_see_no_extensions_and_plain_states() {
        let value = json!({ "models": [{ "state": "NotYet", "ext": [] }], "more": false, "ext": [] });
        assert_eq!(for_scripts(value), json!({ "models": [{ "state": "not_yet" }] }));
    }
}
