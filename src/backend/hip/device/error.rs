//! Errors of a device. Each failed driver call carries device, call, code and name.

use crate::backend::hip::device::arena::Purpose;
use crate::backend::hip::device::binding::sys::hipError_t as Code;
use crate::backend::hip::device::binding::{LibraryError, Raw};
use crate::backend::hip::kernels::extent::OutOfBounds;
use crate::backend::hip::kernels::objects::ObjectError;
use crate::backend::{BackendError, Shortage, cause};

/// Why a device did not do what was asked. The text says what to do about it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum HipError {
    /// There is no usable runtime.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A call failed; the device still works.
    #[error("{failure}{}", advice(failure.code))]
    Call {
        /// The failed call.
        failure: CallFailure,
    },
    /// The device stopped working; everything on it is unusable.
    #[error("the device is lost: {failure}; its models are lost too. {LOST_ADVICE}")]
    Lost {
        /// The call that reported the loss.
        failure: CallFailure,
    },
    /// Device memory is short.
    #[error(
        "device {device} is out of memory: {need_bytes} bytes are needed for {purpose}, {free_bytes} are free; unload a model, \
         lower the memory limits in the configuration, or end other programs on this GPU"
    )]
    OutOfMemory {
        /// Device number.
        device: u32,
        /// Purpose of the allocation.
        purpose: Purpose,
        /// Requested bytes.
        need_bytes: u64,
        /// Bytes still available from the driver within the limit.
        free_bytes: u64,
    },
    /// The runtime works but finds no device.
    #[error(
        "the HIP runtime sees no device: is there a GPU that ROCm supports, is the amdgpu driver loaded, may this user open \
         /dev/kfd and /dev/dri/render* (groups render and video)?"
    )]
    NoDevice,
    /// The device number does not exist.
    #[error("there is no device {device}: the HIP runtime sees {count}")]
    NoSuchDevice {
        /// Requested device number.
        device: u32,
        /// Number of devices.
        count: u32,
    },
    /// No code for this device.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// An invalid launch or copy: a bug in this program, refused before the driver sees it.
    #[error("refused: {what}: {why}")]
    Refused {
        /// Kernel or operation.
        what: &'static str,
        /// The broken rule, with the numbers.
        why: String,
    },
    /// A launch that would touch memory outside an argument's: a bug in this program, refused before the driver sees it.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
}

impl From<HipError> for BackendError {
    fn from(error: HipError) -> Self {
        match error {
            HipError::Lost { failure } => Self::DeviceLost {
                device: format!("device {}", failure.device.unwrap_or(0)),
                call: failure.call,
                why: format!("code {} ({}); {LOST_ADVICE}", failure.code, failure.name),
            },
            HipError::OutOfMemory { purpose, need_bytes, .. } => {
                let need = Some((purpose.to_string(), need_bytes));
                Self::Device { short: Some(Shortage { need }), source: cause(error) }
            }
            other => {
                let short = other.is_out_of_memory().then_some(Shortage { need: None });
                Self::Device { short, source: cause(other) }
            }
        }
    }
}

/// Advice for a lost device.
const LOST_ADVICE: &str = "if it happens again, read the kernel log (dmesg, amdgpu lines) and reset the GPU";

/// A driver call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{call} failed with code {code} ({name})", Device(*device))]
pub struct CallFailure {
    /// Device number; `None` for calls that belong to no device.
    pub device: Option<u32>,
    /// The driver's function.
    pub call: &'static str,
    /// Result code.
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
    /// Whether the device is lost for good.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }

    /// Whether device memory was short.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } => true,
            Self::Call { failure } => failure.code == Code::hipErrorOutOfMemory as Raw,
            _ => false,
        }
    }

    /// The failed driver call, if there was one.
    pub fn failure(&self) -> Option<&CallFailure> {
        match self {
            Self::Call { failure } | Self::Lost { failure } => Some(failure),
            _ => None,
        }
    }

    pub(in crate::backend::hip) fn refused(what: &'static str, why: impl Into<String>) -> Self {
        Self::Refused { what, why: why.into() }
    }
}

/// Whether a device answers only errors after this code. It needs a new context, which needs a new process.
pub(in crate::backend::hip) fn means_lost(code: Raw) -> bool {
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

/// Advice for codes with one usual cause; else empty.
fn advice(code: Raw) -> &'static str {
    const IMAGE: [Code; 3] =
        [Code::hipErrorInvalidImage, Code::hipErrorNoBinaryForGpu, Code::hipErrorInvalidKernelFile];
    if code == Code::hipErrorOutOfMemory as Raw {
        "; unload a model, or end other programs on this GPU"
    } else if code == Code::hipErrorInsufficientDriver as Raw {
        "; the kernel driver is older than the HIP runtime: update amdgpu"
    } else if IMAGE.iter().any(|image| *image as Raw == code) {
        "; the runtime rejects the code built for this GPU: update ROCm (6.4.1 or newer for generic targets)"
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
