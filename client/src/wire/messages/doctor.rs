//! Messages of the daemon's GPU checks.

use serde::{Deserialize, Serialize};

use super::Ext;
use crate::wire::validate::{any, extensions, limits, list, text, validate};

/// Asks the daemon to check its GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoctorRequest {
    /// Extensions.
    pub ext: Ext,
}

/// Results of the GPU checks: what works, what is missing, how to fix it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoctorReply {
    /// The checks, in the order in which one depends on another.
    pub checks: Vec<DoctorCheck>,
    /// The GPUs that the runtime reports.
    pub gpus: Vec<GpuEntry>,
    /// Extensions.
    pub ext: Ext,
}

/// One check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoctorCheck {
    /// Name of the check.
    pub name: String,
    /// Its result.
    pub state: CheckState,
    /// The result of the check.
    pub found: String,
    /// How to fix it; empty if nothing needs fixing or `found` says it.
    pub advice: String,
    /// Extensions.
    pub ext: Ext,
}

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckState {
    /// Works as it should.
    Good,
    /// Worth knowing, but nothing to fix.
    Note,
    /// A fault: a GPU cannot be used, or the daemon cannot be reached.
    Problem,
}

/// A GPU that the runtime reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuEntry {
    /// The runtime's number of the GPU.
    pub index: u32,
    /// Product name.
    pub name: String,
    /// Architecture with its features.
    pub arch: String,
    /// PCI address; empty if the runtime does not report it.
    pub pci: String,
    /// Memory of the device, in bytes.
    pub memory_bytes: u64,
    /// Free memory, in bytes; 0 if the GPU does not work.
    pub memory_free_bytes: u64,
    /// Compute units.
    pub units: u32,
    /// Lanes of a wave.
    pub wave: u32,
    /// Architecture of the kernels chosen for it; empty if there are none.
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
