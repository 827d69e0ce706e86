//! Errors of constraints.

use super::ConstraintKind;
use crate::share::Refusal;

/// Why a constraint cannot be used, or cannot be followed any further.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    /// Its text is wrong, or asks for something that is not supported.
    #[error("the {kind} cannot be used: {reason}")]
    Invalid {
        /// Its kind.
        kind: ConstraintKind,
        /// The fault, in the compiler's words.
        reason: String,
    },
    /// Its text is too long.
    #[error("the {kind} has {bytes} bytes, the limit is {limit}: shorten it")]
    TooLong {
        /// Its kind.
        kind: ConstraintKind,
        /// Bytes of its text.
        bytes: usize,
        /// Most bytes.
        limit: usize,
    },
    /// It grows beyond a bound of memory or work, when it is compiled or later.
    #[error("the {kind} is too complex: {reason}: simplify it")]
    TooComplex {
        /// Its kind.
        kind: ConstraintKind,
        /// The bound, in the compiler's words.
        reason: String,
    },
    /// It took too long.
    #[error("the {kind} took more than {seconds} s: simplify it")]
    TooSlow {
        /// Its kind.
        kind: ConstraintKind,
        /// Longest time.
        seconds: u64,
    },
    /// Too many are being compiled.
    #[error("too many constraints are being compiled; try again later: {}", .0.told(1, "of them"))]
    Busy(Refusal),
    /// The table of a passed model's vocabulary finds no room.
    #[error("no room for the table of the model's vocabulary (limits.header_mib): {}: unload another", .0.told(1 << 20, "MiB"))]
    NoRoom(Refusal),
    /// No token fits, and the answer is not complete.
    #[error("no token of the vocabulary continues the answer as the {kind} wants it")]
    NoToken {
        /// Its kind.
        kind: ConstraintKind,
    },
    /// The model's vocabulary cannot be constrained.
    #[error("the model's vocabulary cannot be constrained: {0}")]
    Vocabulary(&'static str),
    /// The system gives no thread to compile with, or no process to try it in.
    #[error("nothing compiles the {kind} now: {reason}: try again later")]
    NoThread {
        /// Its kind.
        kind: ConstraintKind,
        /// The system's error.
        reason: String,
    },
    /// A fault of the compiler or the daemon.
    #[error("internal error in a constraint: {0}")]
    Internal(String),
}
