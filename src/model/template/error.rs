//! Errors of rendering a chat template.

/// Why a conversation was not rendered. Texts from the template are at most 1 KiB.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template is longer than the limit and was not parsed.
    #[error("the chat template has {bytes} bytes; the limit is {limit} bytes")]
    SourceTooLong {
        /// Length in bytes.
        bytes: usize,
        /// Limit in bytes.
        limit: usize,
    },
    /// The conversation is longer than the limit and was not sent.
    #[error("the conversation has {bytes} bytes as JSON; the limit is {limit} bytes")]
    RequestTooLong {
        /// Length in bytes.
        bytes: usize,
        /// Limit in bytes.
        limit: usize,
    },
    /// The template is not valid or supported Jinja.
    #[error("the model's chat template cannot be read: {message}")]
    Syntax {
        /// The reason, with the line.
        message: String,
    },
    /// The template itself refuses the conversation (`raise_exception`).
    #[error("the model's chat template refuses this conversation: {message}")]
    Refused {
        /// The template's message.
        message: String,
    },
    /// The template failed while it ran.
    #[error("the model's chat template failed: {message}")]
    Failed {
        /// The reason, with the line.
        message: String,
    },
    /// The template exceeded its steps, processor time or deadline.
    #[error("the model's chat template did not end within {limit}")]
    TooSlow {
        /// The limit that was exceeded.
        limit: String,
    },
    /// The template exceeded its memory limit.
    #[error("the model's chat template needs more than {limit_mib} MiB of memory")]
    OutOfMemory {
        /// Limit in MiB.
        limit_mib: u64,
    },
    /// The rendered text exceeds the limit.
    #[error("the model's chat template makes more than {limit} bytes of text")]
    OutputTooLong {
        /// Limit in bytes.
        limit: usize,
    },
    /// The template, or a value that it makes, nests too deep for the stack of the rendering process.
    #[error("the model's chat template nests too deep, or makes values that do")]
    TooDeep,
    /// The rendering process died unexpectedly.
    #[error("the process that renders the chat template died: {status}")]
    Died {
        /// Exit status or signal.
        status: String,
    },
    /// The daemon could not start the rendering process or communicate with it.
    #[error("the process that renders chat templates could not be {action}")]
    Process {
        /// Failed action: started, written to, read from or waited for.
        action: &'static str,
        /// The underlying error.
        #[source]
        source: std::io::Error,
    },
}
