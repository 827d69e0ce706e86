//! Kernels that say how fast a device is.

use super::super::pointer::DevicePtr;
use super::kernels;

kernels! {
    /// Reads or copies all of `input`: how fast the device reads, and reads and writes.
    ProbeMemory [probe_read, probe_copy] {
        /// 16-byte words.
        input: DevicePtr<u32>,
        /// `probe_read`: the xor of what each block read, a word a block. `probe_copy`: as many 16-byte words as are read.
        output: DevicePtr<u32>,
        /// 16-byte words in `input`.
        count: u64,
    }

    /// Adds one to a counter, in blocks of 64 threads: what a launch costs, and whether it took place.
    ProbeLaunch [probe_launch] {
        /// The counter.
        count: DevicePtr<u32>,
    }
}
