//! Kernels that measure a device's speed.

use super::kernels;
use crate::backend::hip::device::pointer::DevicePtr;

kernels! {
    /// Reads or copies all of `input`, to measure read and copy bandwidth.
    ProbeMemory [probe_read, probe_copy] {
        /// 16-byte words.
        input: DevicePtr<u32>,
        /// `probe_read`: the xor of what each workgroup read, one word per workgroup. `probe_copy`: as many 16-byte
        /// words as `input`.
        output: DevicePtr<u32>,
        /// 16-byte words in `input`.
        count: u64,
    }

    /// Adds one to a counter, in workgroups of 64 threads, to measure a launch and to check that it ran.
    ProbeLaunch [probe_launch] {
        /// The counter.
        count: DevicePtr<u32>,
    }
}
