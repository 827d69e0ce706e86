//! Errors of a backend, whichever it is.

use std::error::Error;
use std::sync::Arc;

use crate::tensor::DType;

/// The error that caused another; shared, because an error of a step goes to each of its requests.
pub type Cause = Arc<dyn Error + Send + Sync>;

/// A cause from an error or from a text.
pub fn cause(error: impl Into<Box<dyn Error + Send + Sync>>) -> Cause {
    Arc::from(error.into())
}

/// Memory that a device lacked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Purpose of the memory, and bytes needed; unknown when a call of the runtime failed for want of its own.
    pub need: Option<(String, u64)>,
}

/// Errors of a backend.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BackendError {
    /// This backend has no arithmetic for a tensor type.
    #[error("tensor {tensor}: type {dtype} is not supported by the {backend} backend")]
    Unsupported {
        /// Tensor name.
        tensor: String,
        /// Its element type.
        dtype: DType,
        /// Backend kind.
        backend: &'static str,
    },
    /// This backend has no arithmetic for an operation or its attributes.
    #[error("the {backend} backend cannot run {operation}")]
    Operation {
        /// The operation, as `attention of heads of 512 values`.
        operation: String,
        /// Backend kind.
        backend: &'static str,
    },
    /// The model is larger than the backend can count or address.
    #[error("model dimensions refused: {0}")]
    Dims(&'static str),
    /// The backend could not be started.
    #[error("{what}: {source}")]
    Start {
        /// The missing part.
        what: &'static str,
        /// Reason.
        source: Cause,
    },
    /// Not enough host memory.
    #[error("{what} needs {need_bytes} bytes, which could not be allocated")]
    OutOfMemory {
        /// Purpose of the memory.
        what: &'static str,
        /// Bytes needed.
        need_bytes: u64,
    },
    /// A step's arrays contradict each other or the model: a bug of the caller, reported instead of computed.
    #[error("step batch refused: {0}")]
    Batch(&'static str),
    /// A call came before the calls that it needs: a bug of the caller.
    #[error("call out of order: {0}")]
    OutOfOrder(&'static str),
    /// A call named something that is not on the device: a bug of the caller.
    #[error("not on the device: {0}")]
    Absent(&'static str),
    /// An internal check failed: a bug, reported instead of computed.
    #[error("internal error of the backend: {0}")]
    Internal(String),
    /// A device is gone, hangs, or can no longer be trusted.
    #[error("{device} was lost in {call}: {why}")]
    DeviceLost {
        /// Device name.
        device: String,
        /// The failed call.
        call: &'static str,
        /// The call's error, with its code.
        why: String,
    },
    /// A device refused or failed a call, and still works.
    #[error("{source}")]
    Device {
        /// Set if memory was short.
        short: Option<Shortage>,
        /// The runtime's error.
        source: Cause,
    },
    /// A tensor's upload failed.
    #[error("tensor {tensor} could not be loaded to the device: {source}")]
    Upload {
        /// Tensor name.
        tensor: String,
        /// Reason.
        source: Cause,
    },
    /// No request needed the step any more.
    #[error("the step was abandoned")]
    GivenUp,
    /// Logits hold infinities or NaN: the weights are broken.
    #[error("logits are not finite: the model's weights hold infinities or NaN")]
    NotFinite,
}

impl BackendError {
    /// If memory was short: its purpose and the bytes needed.
    pub fn needs(&self) -> Option<(String, u64)> {
        match self {
            Self::OutOfMemory { what, need_bytes } => Some(((*what).to_owned(), *need_bytes)),
            Self::Device { short, .. } => short.as_ref()?.need.clone(),
            _ => None,
        }
    }

    /// Whether memory was short. The same call may succeed once memory is freed.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::Device { short: Some(_), .. })
    }
}
