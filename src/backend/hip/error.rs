//! What goes wrong with a device, each with device, call, code and name.

use super::super::BackendError;
use super::arena::Owner;
use super::binding::sys::hipError_t as Code;
use super::binding::{LibraryError, Raw};
use super::objects::ObjectError;

/// Why a device did not do what was asked. The text says what to do about it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum HipError {
    /// There is no usable runtime.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A call failed; the device goes on.
    #[error("{failure}{}", advice(failure.code))]
    Call {
        /// Which and how.
        failure: CallFailure,
    },
    /// The device stopped working: nothing on it can be used any more.
    #[error("the device is lost: {failure}; its models are gone with it. {LOST_ADVICE}")]
    Lost {
        /// The call that showed it.
        failure: CallFailure,
    },
    /// Device memory is short.
    #[error(
        "device {device}: {need_bytes} bytes for {owner} could not be had, {free_bytes} are free; unload a model, lower the \
         memory limits in the configuration, or end other programs on this GPU"
    )]
    OutOfMemory {
        /// Its number.
        device: u32,
        /// What for.
        owner: Owner,
        /// How much.
        need_bytes: u64,
        /// What the driver has left.
        free_bytes: u64,
    },
    /// The runtime works and sees no device.
    #[error(
        "the HIP runtime sees no device: is there a GPU that ROCm knows, is the amdgpu driver loaded, may this user open \
         /dev/kfd and /dev/dri/render* (groups render and video)?"
    )]
    NoDevice,
    /// No such device.
    #[error("there is no device {device}: the HIP runtime sees {count}")]
    NoSuchDevice {
        /// Asked for.
        device: u32,
        /// There are.
        count: u32,
    },
    /// No code for this device.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// A launch or a copy that cannot be right: a bug of ours, refused before the driver sees it.
    #[error("refused: {what}: {why}")]
    Refused {
        /// Kernel or operation.
        what: &'static str,
        /// Which rule it breaks, with the numbers.
        why: String,
    },
}

impl From<HipError> for BackendError {
    fn from(error: HipError) -> Self {
        match error {
            HipError::Lost { failure } => Self::DeviceLost {
                device: format!("device {}", failure.device.unwrap_or(0)),
                call: failure.call,
                why: format!("code {} ({}); {LOST_ADVICE}", failure.code, failure.name),
            },
            other => Self::Device(other),
        }
    }
}

/// What a user can do about a lost device.
const LOST_ADVICE: &str =
    "if it happens again, see the kernel's log (dmesg, lines of amdgpu) and reset the GPU";

/// A driver call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{call} failed with code {code} ({name})", Device(*device))]
pub struct CallFailure {
    /// Device number; `None` for calls of the runtime itself.
    pub device: Option<u32>,
    /// The driver's function.
    pub call: &'static str,
    /// What it returned.
    pub code: u32,
    /// The driver's name of the code.
    pub name: String,
}

struct Device(Option<u32>);

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(index) => write!(f, "device {index}: "),
            None => Ok(()),
        }
    }
}

impl HipError {
    /// Whether the device cannot be used any more.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }

    /// Whether memory was short.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } => true,
            Self::Call { failure } => failure.code == Code::hipErrorOutOfMemory as Raw,
            _ => false,
        }
    }

    /// The failed driver call, if it was one.
    pub fn failure(&self) -> Option<&CallFailure> {
        match self {
            Self::Call { failure } | Self::Lost { failure } => Some(failure),
            _ => None,
        }
    }

    pub(super) fn refused(what: &'static str, why: impl Into<String>) -> Self {
        Self::Refused { what, why: why.into() }
    }
}

/// Codes after which a device answers nothing but errors: its context has to be made again, which takes a new process.
pub(super) fn means_lost(code: Raw) -> bool {
    const LOST: [Code; 12] = [
        Code::hipErrorDeinitialized,
        Code::hipErrorPriorLaunchFailure,
        Code::hipErrorNoDevice,
        Code::hipErrorInvalidContext,
        Code::hipErrorECCNotCorrectable,
        Code::hipErrorIllegalAddress,
        Code::hipErrorLaunchTimeOut,
        Code::hipErrorContextIsDestroyed,
        Code::hipErrorAssert,
        Code::hipErrorLaunchFailure,
        Code::hipErrorRuntimeMemory,
        Code::hipErrorRuntimeOther,
    ];
    LOST.iter().any(|lost| *lost as Raw == code)
}

/// What a user can do about a code that has one usual cause.
fn advice(code: Raw) -> &'static str {
    const IMAGE: [Code; 3] =
        [Code::hipErrorInvalidImage, Code::hipErrorNoBinaryForGpu, Code::hipErrorInvalidKernelFile];
    if code == Code::hipErrorOutOfMemory as Raw {
        "; unload a model, or end other programs on this GPU"
    } else if code == Code::hipErrorInsufficientDriver as Raw {
        "; the kernel driver is older than the HIP runtime: update amdgpu"
    } else if IMAGE.iter().any(|image| *image as Raw == code) {
        "; the runtime does not take the code built for this GPU: update ROCm (6.4.1 or newer for generic targets)"
    } else {
        ""
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(code: u32) -> CallFailure {
        CallFailure { device: Some(1), call: "hipMalloc", code, name: "a name".into() }
    }

    #[test]
    fn the_text_names_device_call_code_and_name() {
        let text = HipError::Call { failure: failure(2) }.to_string();
        assert!(text.starts_with("device 1: hipMalloc failed with code 2 (a name); unload"), "{text}");
        let text = HipError::Call { failure: failure(4711) }.to_string();
        assert_eq!(text, "device 1: hipMalloc failed with code 4711 (a name)");
    }

    #[test]
    fn codes_of_a_dead_device_are_told_from_passing_ones() {
        assert!([700, 702, 719, 214, 1053].iter().all(|code| means_lost(*code)));
        assert!([0, 1, 2, 98, 200, 500, 600, 801, 900, 910, 999, 4711].iter().all(|code| !means_lost(*code)));
        assert!(HipError::Call { failure: failure(2) }.is_out_of_memory());
        assert!(HipError::Lost { failure: failure(719) }.is_lost());
    }
}
