//! Refusals and failures, in the form of each API.

use rocmforge_client::ClientError;
use rocmforge_client::wire::{ErrorClass, ErrorCode};
use serde_json::{Value, json};

use crate::api::Api;

/// Seconds after which a client may try again, if the daemon names no time.
const RETRY_AFTER_S: u32 = 1;

/// Status of a request that somebody cancelled in the daemon. No client repeats it on its own.
const CANCELLED: u16 = 499;

/// Why a request gets no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Status of the HTTP response.
    pub status: u16,
    /// The event, and what to do.
    pub message: String,
    /// The field at fault.
    pub param: Option<String>,
    /// A name for programs.
    pub code: Option<&'static str>,
    /// The same request may succeed after so many seconds.
    pub retry_after_s: Option<u32>,
}

impl Failure {
    /// A failure without further fields.
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, retry_after_s: None }
    }

    /// A request that is at fault.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(400, message)
    }

    /// The same failure, with the field at fault.
    #[must_use]
    pub fn about(mut self, param: &str) -> Self {
        self.param = Some(param.to_owned());
        self
    }

    /// The same failure, with a name for programs.
    #[must_use]
    pub fn coded(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// The failure as the API's clients read it.
    pub fn body(&self, api: Api) -> Value {
        match api {
            Api::OpenAi | Api::Own => json!({"error": {
                "message": self.message,
                "type": self.openai_type(),
                "param": self.param,
                "code": self.code,
            }}),
            Api::Anthropic => json!({
                "type": "error",
                "error": {"type": self.anthropic_type(), "message": self.message},
            }),
            Api::Ollama => json!({"error": self.message}),
        }
    }

    fn openai_type(&self) -> &'static str {
        match self.status {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    fn anthropic_type(&self) -> &'static str {
        match self.status {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let code = error.code().and_then(ErrorCode::from_u16);
        let status = match &error {
            // The request was too large for a frame of the daemon, or a field of it for its limit.
            ClientError::Request(_) => 413,
            ClientError::PermissionDenied { .. } | ClientError::UntrustedServer { .. } => 502,
            ClientError::UnsupportedVersion { .. } | ClientError::CannotAct | ClientError::Protocol(_) => 502,
            ClientError::TooManyStreams { .. } => 503,
            ClientError::Timeout { .. } => 504,
            ClientError::Server(of_daemon) => status(of_daemon.code),
            _ => 503,
        };
        let message = match &error {
            ClientError::Server(of_daemon) => of_daemon.message.clone(),
            other => other.to_string(),
        };
        let retry = error.is_retryable() || status == 503;
        let seconds = error.retry_after_ms().div_ceil(1000).max(RETRY_AFTER_S);
        let failure = Self { retry_after_s: retry.then_some(seconds), ..Self::new(status, message) };
        match code {
            Some(ErrorCode::ModelNotFound) => failure.about("model").coded("model_not_found"),
            Some(ErrorCode::PromptTooLong) => failure.coded("context_length_exceeded"),
            Some(code) => failure.coded(code.name()),
            None => failure,
        }
    }
}

/// The HTTP status of a code of the daemon; an unknown code is read by its class.
fn status(code: u16) -> u16 {
    match (ErrorCode::from_u16(code), ErrorClass::of(code)) {
        (Some(ErrorCode::ModelNotFound), _) => 404,
        (Some(ErrorCode::Forbidden), _) => 403,
        (Some(ErrorCode::LimitExceeded), _) => 413,
        (Some(ErrorCode::Cancelled), _) => CANCELLED,
        (Some(ErrorCode::SlowReader), _) => 408,
        (Some(ErrorCode::DeadlineExceeded), _) => 504,
        (Some(ErrorCode::Quota), _) => 429,
        (Some(ErrorCode::DoesNotFit), _) => 400,
        (Some(ErrorCode::OutOfMemory), _) => 503,
        (_, Some(ErrorClass::Request)) => 400,
        (_, Some(ErrorClass::Capacity)) => 503,
        (_, Some(ErrorClass::Model)) => 422,
        _ => 500,
    }
}

#[cfg(test)]
mod tests {
    use rocmforge_client::wire::WireError;

    use super::*;

    #[test]
    fn every_code_of_the_daemon_has_a_status_of_its_kind() {
        for code in ErrorCode::ALL {
            let failure = Failure::from(ClientError::Server(WireError::new(*code, "the daemon's words")));
            let kind = failure.status / 100;
            let wanted: &[u16] = match code.class() {
                ErrorClass::Request => &[4, 5],
                ErrorClass::Capacity => &[4, 5],
                ErrorClass::Model => &[4],
                _ => &[5],
            };
            assert!(wanted.contains(&kind), "{code:?}: {}", failure.status);
            assert_eq!(failure.retry_after_s.is_some(), code.retryable(), "{code:?}");
            assert_eq!(failure.message, "the daemon's words");
            for api in [Api::OpenAi, Api::Anthropic, Api::Ollama] {
                assert!(failure.body(api).to_string().contains("the daemon's words"));
            }
        }
    }
}
