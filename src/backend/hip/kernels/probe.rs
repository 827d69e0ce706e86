//! Kernels that measure a device's speed.

use super::kernels;
use crate::backend::hip::device::pointer::DevicePtr;

kernels! { |launch|
    /// Reads all of `input`, to measure read bandwidth. Grid: any width.
    ProbeRead [probe_read] {
        /// 16-byte words.
        input: DevicePtr<u32> [4 * count],
        /// The xor of what each workgroup read, one word per workgroup.
        output: DevicePtr<u32> [launch.x],
        /// 16-byte words in `input`.
        count: u64,
    }

    /// Copies all of `input`, to measure copy bandwidth. Grid: any width.
    ProbeCopy [probe_copy] {
        /// 16-byte words.
        input: DevicePtr<u32> [4 * count],
        /// As many 16-byte words.
        output: DevicePtr<u32> [4 * count],
        /// 16-byte words in `input`.
        count: u64,
    }

    /// Adds one to a counter, in workgroups of 64 threads, to measure a launch and to check that it ran.
    ProbeLaunch [probe_launch] {
        /// The counter.
        count: DevicePtr<u32> [1],
    }
}
