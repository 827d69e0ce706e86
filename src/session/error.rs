//! Maps errors of the layers below to their codes on the wire.
//!
//! One table, so that each code has one meaning. Errors of framing and payloads (`HeaderError`, `CodecError`,
//! `ReceiveError`) carry their own codes. The errors supply the texts; the texts name models by name, never by path.

use rocmforge_client::wire::{CodecError, ErrorCode, WireError};

use super::extras::ExtrasError;
use super::sessions::SessionError;
use crate::backend::BackendError;
use crate::model::ModelError;
use crate::model::constraint::ConstraintError;
use crate::model::files::FilesError;
use crate::model::gguf::GgufError;
use crate::model::plan::PlanError;
use crate::model::store::{CopyError, OpenError, StoreError};
use crate::model::template::TemplateError;
use crate::model::tokenizer::TokenizerError;
use crate::scheduler::JobError;
use crate::share::{Refusal, Whose};
use crate::tensor::{MapError, is_shortage};

/// Retry delay sent to clients when queues are full.
const BUSY_RETRY_MS: u32 = 500;

/// Retry delay sent to clients when the daemon restarts.
const DRAINING_RETRY_MS: u32 = 1000;

/// A request's failure, ready to send.
pub(super) type Failure = WireError;

pub(super) fn failure(code: ErrorCode, message: &str) -> Failure {
    let error = WireError::new(code, message);
    match code {
        ErrorCode::Busy | ErrorCode::Quota => error.with_retry_after_ms(BUSY_RETRY_MS),
        ErrorCode::ServerDraining => error.with_retry_after_ms(DRAINING_RETRY_MS),
        _ => error,
    }
}

pub(super) fn of_codec(error: &CodecError) -> Failure {
    failure(error.code(), &error.to_string())
}

/// `Busy`: the daemon itself lacks descriptors or memory that the request needs. `what` is the cause, for the message.
pub(super) fn shortage(what: &str) -> Failure {
    let text = format!(
        "the daemon is short of file descriptors or memory ({what}): try again; if this lasts, check LimitNOFILE of \
         its unit and the machine's free memory"
    );
    failure(ErrorCode::Busy, &text)
}

/// The code of a refused share: the user's own fault, or that of all together.
pub fn share_code(refusal: &Refusal) -> ErrorCode {
    match refusal.whose {
        Whose::Own => ErrorCode::Quota,
        Whose::Everybody => ErrorCode::Busy,
    }
}

/// A refused share; `about` begins the sentence, amounts are in `unit`s of the name `what`.
pub(super) fn of_refusal(refusal: &Refusal, about: &str, unit: u64, what: &str) -> Failure {
    let text = format!("{about}: {}", refusal.told(unit, what));
    let failure = failure(share_code(refusal), &text)
        .with_detail("wanted", refusal.wanted)
        .with_detail("own", refusal.own)
        .with_detail("limit", refusal.limit_told())
        .with_detail("total", refusal.total);
    if refusal.privileged { failure.with_detail("held", refusal.held) } else { failure }
}

/// An answer that was made but not sent, because the user does not read its answers.
pub(super) fn of_unread(refusal: &Refusal) -> Failure {
    of_refusal(refusal, "there is no room for this answer beside unread ones", 1 << 10, "KiB")
}

pub(super) fn of_session(error: &SessionError) -> Failure {
    let code = match error {
        SessionError::InUse { .. } => ErrorCode::Busy,
        SessionError::OtherModel { .. } | SessionError::OtherKind { .. } => ErrorCode::InvalidArgument,
        SessionError::OtherFile { .. } => ErrorCode::ModelChanged,
        SessionError::TooLarge { .. } => ErrorCode::LimitExceeded,
        SessionError::TooMany { .. } => ErrorCode::Quota,
        SessionError::Full { refusal } => share_code(refusal),
    };
    let failure = failure(code, &error.to_string());
    match error {
        SessionError::OtherModel { has, .. } => failure.with_detail("model", has),
        SessionError::TooLarge { bytes, limit, .. } => {
            failure.with_detail("bytes", bytes).with_detail("limit", limit)
        }
        _ => failure,
    }
}

pub(super) fn of_store(error: &StoreError) -> Failure {
    if error.is_shortage() {
        return shortage(&error.to_string());
    }
    failure(store_code(error), &error.to_string())
}

pub(super) fn of_template(error: &TemplateError) -> Failure {
    let code = match error {
        TemplateError::Process { .. } => ErrorCode::Unavailable,
        TemplateError::RequestTooLong { .. } => ErrorCode::LimitExceeded,
        _ => ErrorCode::TemplateFailed,
    };
    if let TemplateError::Process { source, .. } = error {
        tracing::warn!(%error, %source, "rendering a chat template failed");
        if is_shortage(source) {
            return shortage(&format!("{error}: {source}"));
        }
    }
    failure(code, &error.to_string())
}

pub(super) fn of_extras(error: &ExtrasError) -> Failure {
    let code = match error {
        ExtrasError::Shape { .. } => ErrorCode::InvalidArgument,
        ExtrasError::TooMany { .. } | ExtrasError::TooManyTools { .. } => ErrorCode::LimitExceeded,
    };
    failure(code, &error.to_string())
}

pub(super) fn of_constraint(error: &ConstraintError) -> Failure {
    if matches!(error, ConstraintError::NoThread { .. }) {
        return shortage(&error.to_string());
    }
    failure(constraint_code(error), &error.to_string())
}

pub(super) fn of_job(error: &JobError) -> Failure {
    let failure = failure(job_code(error), &error.to_string());
    match error {
        JobError::NoRoom { what, need_bytes, free_bytes, budget_bytes, held } => failure
            .with_detail("what", what)
            .with_detail("need_bytes", need_bytes)
            .with_detail("free_bytes", free_bytes)
            .with_detail("budget_bytes", budget_bytes)
            .with_detail("held", held),
        JobError::DoesNotFit { context_tokens, need_bytes, budget_bytes } => failure
            .with_detail("context_tokens", context_tokens)
            .with_detail("need_bytes", need_bytes)
            .with_detail("budget_bytes", budget_bytes),
        JobError::AboveShare { context_tokens, need_bytes, share_bytes, percent } => failure
            .with_detail("context_tokens", context_tokens)
            .with_detail("need_bytes", need_bytes)
            .with_detail("share_bytes", share_bytes)
            .with_detail("percent", percent),
        JobError::WideText { tokens, need_bytes, most_bytes } => failure
            .with_detail("tokens", tokens)
            .with_detail("need_bytes", need_bytes)
            .with_detail("most_bytes", most_bytes),
        JobError::NoSuchLayer { layer, layers } => {
            failure.with_detail("layer", layer).with_detail("layers", layers)
        }
        JobError::QueueFull { queued, limit } => {
            failure.with_detail("queued", queued).with_detail("limit", limit)
        }
        _ => failure,
    }
}

/// The wire code for a model that the store cannot provide.
pub fn store_code(error: &StoreError) -> ErrorCode {
    match error {
        StoreError::NotFound { .. } => ErrorCode::ModelNotFound,
        StoreError::BadName { .. } => ErrorCode::InvalidArgument,
        StoreError::Unusable { .. } => ErrorCode::NotAModelFile,
        StoreError::File { source, .. } => map_code(source),
        StoreError::Open { source, .. } => match &**source {
            OpenError::Model(error) => model_code(error),
            OpenError::Backend(error) => backend_code(error),
            OpenError::Copy(CopyError::Changed { .. }) => ErrorCode::ModelChanged,
            OpenError::Copy(_) => ErrorCode::Unavailable,
            OpenError::Panicked(_) => ErrorCode::Internal,
        },
        StoreError::NoAnswer { .. } => ErrorCode::Unavailable,
        StoreError::Changed { .. } => ErrorCode::ModelChanged,
        StoreError::Poisoned { .. } => ErrorCode::ModelCorrupt,
        StoreError::NotYours { .. }
        | StoreError::NotAdministrator { .. }
        | StoreError::Remote { .. }
        | StoreError::InMemory { .. } => ErrorCode::Forbidden,
        StoreError::Quota { .. } | StoreError::Pins { .. } => ErrorCode::Quota,
        StoreError::TooLarge { refusal, .. } if refusal.is_final() => ErrorCode::LimitExceeded,
        StoreError::TooLarge { refusal, .. } | StoreError::NoDescriptor { refusal, .. } => {
            share_code(refusal)
        }
    }
}

fn map_code(error: &MapError) -> ErrorCode {
    match error {
        MapError::NotRegular { .. } | MapError::Empty => ErrorCode::NotAModelFile,
        MapError::OutOfRange { .. } | MapError::Poisoned => ErrorCode::ModelCorrupt,
        MapError::TooMany { .. } => ErrorCode::Quota,
        MapError::Changed => ErrorCode::ModelChanged,
        MapError::Os { .. } => ErrorCode::Unavailable,
    }
}

fn model_code(error: &ModelError) -> ErrorCode {
    match error {
        ModelError::Files(error) => match error {
            FilesError::Gguf(error) | FilesError::Part { source: error, .. } => gguf_code(error),
            FilesError::Alone { .. } => ErrorCode::NotAModelFile,
            FilesError::Number { .. } | FilesError::Tensors { .. } | FilesError::Twice { .. } => {
                ErrorCode::ModelCorrupt
            }
        },
        ModelError::Tokenizer(TokenizerError::Metadata(error)) => gguf_code(error),
        ModelError::Tokenizer(TokenizerError::Kind(_) | TokenizerError::PreTokenizer { .. }) => {
            ErrorCode::ModelUnsupported
        }
        ModelError::Tokenizer(_) => ErrorCode::ModelCorrupt,
        ModelError::Plan(error) => match error {
            PlanError::Architecture { .. } | PlanError::Feature { .. } | PlanError::UnknownTensors { .. } => {
                ErrorCode::ModelUnsupported
            }
            PlanError::NoArchitecture => ErrorCode::ModelUnsupported,
            PlanError::PerLayer { .. } | PlanError::VectorType { .. } => ErrorCode::ModelUnsupported,
            _ => ErrorCode::ModelCorrupt,
        },
    }
}

fn gguf_code(error: &GgufError) -> ErrorCode {
    match error {
        GgufError::Map(error) => map_code(error),
        GgufError::Read { .. } => ErrorCode::Unavailable,
        GgufError::NoRoom { refusal } => share_code(refusal),
        GgufError::Magic { .. } => ErrorCode::NotAModelFile,
        GgufError::BigEndian { .. } | GgufError::Version { .. } | GgufError::TensorType { .. } => {
            ErrorCode::ModelUnsupported
        }
        _ => ErrorCode::ModelCorrupt,
    }
}

fn backend_code(error: &BackendError) -> ErrorCode {
    match error {
        BackendError::Unsupported { .. } | BackendError::Operation { .. } => ErrorCode::ModelUnsupported,
        BackendError::OutOfMemory { .. } => ErrorCode::OutOfMemory,
        BackendError::NotFinite => ErrorCode::ModelCorrupt,
        BackendError::Dims(_) => ErrorCode::ModelUnsupported,
        BackendError::Start { .. } | BackendError::DeviceLost { .. } | BackendError::Upload { .. } => {
            ErrorCode::DeviceFailed
        }
        BackendError::Device { short: Some(_), .. } => ErrorCode::OutOfMemory,
        BackendError::Device { .. } => ErrorCode::DeviceFailed,
        BackendError::GivenUp => ErrorCode::Cancelled,
        BackendError::Batch(_)
        | BackendError::OutOfOrder(_)
        | BackendError::Absent(_)
        | BackendError::Internal(_) => ErrorCode::Internal,
    }
}

fn constraint_code(error: &ConstraintError) -> ErrorCode {
    match error {
        ConstraintError::Invalid { .. } | ConstraintError::NoToken { .. } => ErrorCode::InvalidArgument,
        ConstraintError::TooLong { .. }
        | ConstraintError::TooComplex { .. }
        | ConstraintError::TooSlow { .. } => ErrorCode::LimitExceeded,
        ConstraintError::Busy(refusal) | ConstraintError::NoRoom(refusal) => share_code(refusal),
        ConstraintError::NoThread { .. } => ErrorCode::Busy,
        ConstraintError::Vocabulary(_) => ErrorCode::ModelUnsupported,
        ConstraintError::Internal(_) => ErrorCode::Internal,
    }
}

fn job_code(error: &JobError) -> ErrorCode {
    match error {
        JobError::Cancelled => ErrorCode::Cancelled,
        JobError::DeadlineExceeded { .. } => ErrorCode::DeadlineExceeded,
        JobError::DoesNotFit { .. } | JobError::AboveShare { .. } | JobError::WideText { .. } => {
            ErrorCode::DoesNotFit
        }
        JobError::NoRoom { .. } => ErrorCode::OutOfMemory,
        JobError::NoSuchLayer { .. } => ErrorCode::InvalidArgument,
        JobError::NoPlace(refusal) => share_code(refusal),
        JobError::QueueFull { .. } => ErrorCode::Busy,
        JobError::Draining => ErrorCode::ServerDraining,
        JobError::SlowReader { .. } => ErrorCode::SlowReader,
        JobError::Model(error) => map_code(error),
        JobError::Backend(error) => backend_code(error),
        JobError::Constraint(error) => constraint_code(error),
        JobError::Invalid(_) | JobError::Panicked(_) => ErrorCode::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacity_errors_say_when_to_come_back_and_texts_fit() {
        let busy = of_job(&JobError::QueueFull { queued: 4, limit: 4 });
        assert_eq!((busy.code, busy.retryable, busy.retry_after_ms), (300, true, BUSY_RETRY_MS));
        let name = "n".repeat(250);
        let long = of_store(&StoreError::Unusable { name, reason: "r".repeat(1000) });
        assert_eq!(long.code, ErrorCode::NotAModelFile as u16);
        assert_eq!(long.message.len(), 512);
        assert!(!long.retryable);
    }

    #[test]
    fn a_device_without_room_says_who_has_it_in_words_and_numbers() {
        let held =
            "first has 700.0 MiB, pinned, KV pages 2.0 MiB, activations 1.0 MiB, other programs 9.0 MiB";
        let error = of_job(&JobError::NoRoom {
            what: "tensor blk.3.ffn_up.weight".into(),
            need_bytes: 33 << 20,
            free_bytes: 5 << 20,
            budget_bytes: 717 << 20,
            held: held.into(),
        });
        assert_eq!((error.code, error.retryable), (ErrorCode::OutOfMemory as u16, true));
        assert_eq!(
            error.message,
            format!(
                "tensor blk.3.ffn_up.weight needs 33.0 MiB of the device's memory: 5.0 MiB of 717.0 MiB are free; {held}. \
                 Unload, unpin or clear a model, or raise device.memory_mib"
            )
        );
        let detail: Vec<_> = error.detail.iter().map(|d| (d.key.as_str(), d.value.as_str())).collect();
        assert_eq!(
            detail,
            [
                ("what", "tensor blk.3.ffn_up.weight"),
                ("need_bytes", "34603008"),
                ("free_bytes", "5242880"),
                ("budget_bytes", "751828992"),
                ("held", held)
            ]
        );
        let error = of_job(&JobError::NoSuchLayer { layer: 5, layers: 5 });
        assert_eq!(error.code, ErrorCode::InvalidArgument as u16);
        assert_eq!(error.message, "the model has no layer 5: it has 5 layers, counted from 0");
    }

    #[test]
    fn shortages_of_the_daemon_are_not_the_files_fault() {
        let lacking = |errno: i32| {
            let source = std::io::Error::from_raw_os_error(errno);
            let source = std::sync::Arc::new(MapError::Os { what: "open", source });
            of_store(&StoreError::File { name: "m".into(), source })
        };
        let (no_descriptors, no_access) = (24, 13);
        let error = lacking(no_descriptors);
        assert_eq!((error.code, error.retryable, error.retry_after_ms), (300, true, BUSY_RETRY_MS));
        assert!(error.message.contains("m: open failed: Too many open files"), "{}", error.message);
        assert_eq!(lacking(no_access).code, ErrorCode::Unavailable as u16);
        let source = std::io::Error::from_raw_os_error(no_descriptors);
        let error = of_template(&TemplateError::Process { action: "started", source });
        assert_eq!((error.code, error.retryable), (300, true));
    }

    #[test]
    fn one_fault_has_one_number_through_whatever_layer_it_comes() {
        let lost = BackendError::DeviceLost { device: "d".into(), call: "c", why: "w".into() };
        let no_memory = BackendError::OutOfMemory { what: "pages", need_bytes: 1 };
        let faults = [
            (of_job(&JobError::Backend(lost)), ErrorCode::DeviceFailed),
            (of_job(&JobError::Backend(no_memory)), ErrorCode::OutOfMemory),
            (of_job(&JobError::Backend(BackendError::GivenUp)), ErrorCode::Cancelled),
            (of_job(&JobError::Backend(BackendError::Dims("odd"))), ErrorCode::ModelUnsupported),
            (of_job(&JobError::Backend(BackendError::NotFinite)), ErrorCode::ModelCorrupt),
            (of_job(&JobError::Backend(BackendError::Batch("empty"))), ErrorCode::Internal),
            (of_job(&JobError::Backend(BackendError::Internal("why".into()))), ErrorCode::Internal),
            (of_job(&JobError::Draining), ErrorCode::ServerDraining),
            (of_job(&JobError::SlowReader { waited_s: 30 }), ErrorCode::SlowReader),
            (of_store(&StoreError::Poisoned { name: "m".into() }), ErrorCode::ModelCorrupt),
            (of_store(&StoreError::Changed { name: "m".into() }), ErrorCode::ModelChanged),
            (of_store(&StoreError::Pins { limit: 8 }), ErrorCode::Quota),
            (of_template(&TemplateError::RequestTooLong { bytes: 9, limit: 8 }), ErrorCode::LimitExceeded),
        ];
        for (failure, code) in faults {
            assert_eq!(failure.code, code as u16, "{failure}");
            assert_eq!(failure.retryable, code.retryable(), "{failure}");
        }
        let of_file =
            |error| of_store(&StoreError::File { name: "m".into(), source: std::sync::Arc::new(error) });
        assert_eq!(of_file(MapError::TooMany { limit: 1024 }).code, ErrorCode::Quota as u16);
        assert_eq!(of_file(MapError::Empty).code, ErrorCode::NotAModelFile as u16);
        let source = std::io::Error::from_raw_os_error(5);
        assert_eq!(gguf_code(&GgufError::Read { offset: 0, source }), ErrorCode::Unavailable);
        assert_eq!(gguf_code(&GgufError::Map(MapError::Poisoned)), ErrorCode::ModelCorrupt);
        assert_eq!(gguf_code(&GgufError::Magic { found: *b"GGML" }), ErrorCode::NotAModelFile);
    }
}
