//! Messages about what of GPUs the daemon finds.

use serde::{Deserialize, Serialize};

use super::Ext;
use crate::wire::validate::{any, extensions, limits, list, text, validate};

/// Asks what of GPUs the daemon finds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoctorRequest {
    /// Extensions.
    pub ext: Ext,
}

/// What of GPUs the daemon finds, what is missing, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoctorReply {
    /// What was looked at, in the order in which one thing needs another.
    pub checks: Vec<DoctorCheck>,
    /// What the GPU's runtime sees.
    pub gpus: Vec<GpuEntry>,
    /// Extensions.
    pub ext: Ext,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoctorCheck {
    /// What.
    pub name: String,
    /// How it is.
    pub state: CheckState,
    /// What was found.
    pub found: String,
    /// What to do; empty where nothing is to be done or `found` says it.
    pub advice: String,
    /// Extensions.
    pub ext: Ext,
}

/// How a thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckState {
    /// As it should be.
    Good,
    /// Worth knowing, nothing to mend.
    Note,
    /// Keeps something from working: a GPU from being used, a daemon from being reached.
    Problem,
}

/// A GPU that its runtime sees.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuEntry {
    /// Its number.
    pub index: u32,
    /// Product name.
    pub name: String,
    /// Architecture with its features.
    pub arch: String,
    /// Where it is plugged in; empty when the runtime does not say.
    pub pci: String,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Free ones; 0 when it does not work.
    pub memory_free_bytes: u64,
    /// Compute units.
    pub units: u32,
    /// Lanes of a wave.
    pub wave: u32,
    /// Architecture of the kernels chosen for it; empty without any.
    pub code: String,
    /// A kernel ran on it and gave the right result.
    pub works: bool,
    /// Extensions.
    pub ext: Ext,
}

validate!(DoctorRequest { ext: extensions });
validate!(DoctorReply { checks: list(limits::CHECKS_MAX), gpus: list(limits::DEVICES_MAX), ext: extensions });
validate!(DoctorCheck {
    name: text(limits::LABEL_BYTES_MAX),
    state: any,
    found: text(limits::VALUE_BYTES_MAX),
    advice: text(limits::VALUE_BYTES_MAX),
    ext: extensions,
});
validate!(GpuEntry {
    index: any,
    name: text(limits::LABEL_BYTES_MAX),
    arch: text(limits::LABEL_BYTES_MAX),
    pci: text(limits::LABEL_BYTES_MAX),
    memory_bytes: any,
    memory_free_bytes: any,
    units: any,
    wave: any,
    code: text(limits::LABEL_BYTES_MAX),
    works: any,
    ext: extensions,
});
