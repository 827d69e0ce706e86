//! Why a conversation was not rendered.

/// Why a conversation was not rendered. Texts that come from the template are at most 1 KiB.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template is too long to be looked at.
    #[error("the chat template has {bytes} bytes; the limit is {limit} bytes")]
    SourceTooLong {
        /// Its bytes.
        bytes: usize,
        /// The most we take.
        limit: usize,
    },
    /// The conversation is too long to be looked at.
    #[error("the conversation has {bytes} bytes as JSON; the limit is {limit} bytes")]
    RequestTooLong {
        /// Its bytes.
        bytes: usize,
        /// The most we take.
        limit: usize,
    },
    /// The template is no Jinja that we know.
    #[error("the model's chat template cannot be read: {message}")]
    Syntax {
        /// Why, with the line.
        message: String,
    },
    /// The template itself refuses the conversation (`raise_exception`).
    #[error("the model's chat template refuses this conversation: {message}")]
    Refused {
        /// What it says.
        message: String,
    },
    /// The template does something that cannot be done.
    #[error("the model's chat template failed: {message}")]
    Failed {
        /// Why, with the line.
        message: String,
    },
    /// It ran out of steps, processor time or patience.
    #[error("the model's chat template did not end within {limit}")]
    TooSlow {
        /// The limit it met.
        limit: String,
    },
    /// It asked for more memory than it may have.
    #[error("the model's chat template needs more than {limit_mib} MiB of memory")]
    OutOfMemory {
        /// The most it may have.
        limit_mib: u64,
    },
    /// The text is too long.
    #[error("the model's chat template makes more than {limit} bytes of text")]
    OutputTooLong {
        /// The most we take.
        limit: usize,
    },
    /// The rendering process ended in a way of its own: most likely the template nests too deep for its stack.
    #[error("the process that renders the chat template died: {status}")]
    Died {
        /// How it ended.
        status: String,
    },
    /// The rendering process could not be started, or not be talked to.
    #[error("the process that renders chat templates could not be {action}")]
    Process {
        /// Started, written to, read from or waited for.
        action: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}
