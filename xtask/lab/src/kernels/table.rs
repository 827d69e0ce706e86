//! A table of the kernels that a decode step spends its time in, as the compiler made them. It shows registers, LDS,
//! waves and bytes in flight, and the share of a device's memory rate that these bytes allow.
//!
//! The share is an estimate on paper (Little's law): bytes in flight over the latency of memory, at most all of the rate. It
//! leaves out launches, ramps and arithmetic. Device figures are the vendor's.

use std::fmt::{self, Display, Formatter};

use super::amd::Object;
use super::gates::Kernel;
use super::latency::{Pass, streaming_pass};
use super::listing::{self, LoopLoads, loop_loads};
use super::targets::Target;

/// Kernels that the table shows.
const HOT: [&str; 20] = [
    "gemv_q4_k_a8_1",
    "gemv_gated_q4_k_a8_1",
    "gemv_experts_q4_k_a8",
    "gemv_experts_gated_q4_k_a8",
    "gemv_q6_k_a8_1",
    "gemv_q4_0_a8_1",
    "gemv_q4_1_a8_1",
    "gemv_q5_1_a8_1",
    "gemv_q8_0_a8_1",
    "gemv_mxfp4_a8_1",
    "gemv_mxfp6_e2m3_a8_1",
    "gemv_nvfp4_a8_1",
    "gemv_q4_k_a8_4",
    "gemv_f16_f32_1",
    "gemm_q4_k_x16_16",
    "gemm_q6_k_x16_16",
    "gemm_q8_0_x16_16",
    "gemm_experts_q4_k_x16_16",
    "attn_decode_matrix_128",
    "attn_decode_f16_128_4",
];

/// Latency of a load from memory under load, seconds.
const LATENCY_S: f64 = 800e-9;
/// Outputs of a workgroup of `gemv_*` at a time (gemv/gemv.h).
const OUTPUTS: u32 = 16;
/// Rows of the matrix for which the share is estimated too: an attention output of a model with 8 billion weights.
const MATRIX_ROWS: u32 = 4096;

/// A device whose share of its memory rate is estimated.
struct Device {
    target: &'static str,
    units: u32,
    bytes_per_s: f64,
}

/// RX 7900 XTX, Radeon AI PRO R9700, Instinct MI300X.
const DEVICES: [Device; 3] = [
    Device { target: "gfx1100", units: 96, bytes_per_s: 960e9 },
    Device { target: "gfx1201", units: 64, bytes_per_s: 640e9 },
    Device { target: "gfx942", units: 304, bytes_per_s: 5.3e12 },
];

/// Resources of a compute unit, as LLVM's AMDGPU usage guide and the vendor's ISA documents state them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Unit {
    simds: u32,
    /// Registers of a lane of a SIMD, and the step in which waves take them.
    registers: u32,
    step: u32,
    waves_max: u32,
    lds: u64,
    /// Lanes of a wave.
    lanes: u32,
}

impl Unit {
    fn of(target: &str) -> Self {
        let cdna = Self { simds: 4, registers: 512, step: 8, waves_max: 8, lds: 64 << 10, lanes: 64 };
        let rdna = Self { simds: 2, registers: 1536, step: 24, waves_max: 16, lds: 64 << 10, lanes: 32 };
        match target {
            "gfx906" | "gfx908" => Self { registers: 256, step: 4, waves_max: 10, ..cdna },
            "gfx950" => Self { lds: 160 << 10, ..cdna },
            "gfx1030" | "gfx10-3-generic" => Self { registers: 1024, step: 8, ..rdna },
            // The generic target has code for the smaller devices of its family too.
            "gfx11-generic" => Self { registers: 1024, step: 16, ..rdna },
            name if name.starts_with("gfx9") => cdna,
            _ => rdna,
        }
    }

    /// Workgroups that fit beside each other.
    fn workgroups(&self, kernel: &Kernel) -> u32 {
        let taken = kernel.registers.max(1).div_ceil(self.step) * self.step;
        let waves = (self.registers / taken).min(self.waves_max) * self.simds;
        let by_lds =
            self.lds.checked_div(kernel.lds).map_or(u32::MAX, |most| most.try_into().unwrap_or(u32::MAX));
        (waves * self.lanes / kernel.threads).min(by_lds)
    }
}

/// A line of the table.
#[derive(Debug)]
pub struct Row {
    target: &'static str,
    kernel: String,
    registers: u32,
    lds: u64,
    /// Waves of a compute unit.
    waves: u32,
    loads: LoopLoads,
    pass: Pass,
    /// Accesses that do not say which memory they go to.
    flat: usize,
    /// KiB that a compute unit has in flight.
    in_flight_kib: f64,
    /// Percent of the memory rate: of a full device, and of one launch for [`MATRIX_ROWS`].
    shares: Option<(f64, f64)>,
}

/// Rows of the hot kernels in one listing.
pub fn rows(target: &'static Target, metadata: &[Kernel], text: &str) -> Vec<Row> {
    let hot = |kernel: &listing::Kernel<'_>| HOT.contains(&kernel.name);
    let found = listing::kernels(text).into_iter().filter(hot);
    found
        .filter_map(|code| row(target, metadata.iter().find(|kernel| kernel.name == code.name)?, &code))
        .collect()
}

fn row(target: &'static Target, kernel: &Kernel, code: &listing::Kernel<'_>) -> Option<Row> {
    let unit = Unit::of(target.name);
    let pass = streaming_pass(code, target.stores_count_as_loads())?;
    let workgroups = unit.workgroups(kernel);
    let of_workgroup = pass.bytes_in_flight() * f64::from(kernel.threads);
    let share = |device: &Device, resident: u32| {
        100.0 * (f64::from(resident) * of_workgroup / LATENCY_S / device.bytes_per_s).min(1.0)
    };
    let device = DEVICES.iter().find(|device| device.target == target.name);
    let shares = device.map(|device| {
        let full = device.units * workgroups;
        (share(device, full), share(device, full.min(MATRIX_ROWS / OUTPUTS)))
    });
    Some(Row {
        target: target.name,
        kernel: code.name.into(),
        registers: kernel.registers,
        lds: kernel.lds,
        waves: workgroups * kernel.threads / unit.lanes,
        loads: loop_loads(code),
        pass,
        flat: code.instructions().filter(|instruction| instruction.name.starts_with("flat_")).count(),
        in_flight_kib: f64::from(workgroups) * of_workgroup / 1024.0,
        shares,
    })
}

/// Prints the rows of all objects.
pub fn print(objects: &[Object]) {
    println!("{HEADING}");
    objects.iter().flat_map(|object| &object.rows).for_each(|row| println!("{row}"));
}

const HEADING: &str = "target           kernel                     regs  LDS KiB  waves  wide %  flat  bytes  latencies  KiB in flight  share %  of 4096 rows";

impl Display for Row {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let wide = 100 * self.loads.wide / self.loads.all.max(1);
        write!(
            f,
            "{:16} {:26} {:4} {:8.1} {:6} {:7} {:5} {:6} {:10.2} {:14.1}",
            self.target,
            self.kernel,
            self.registers,
            self.lds as f64 / 1024.0,
            self.waves,
            wide,
            self.flat,
            self.pass.bytes,
            self.pass.latencies,
            self.in_flight_kib
        )?;
        match self.shares {
            Some((full, matrix)) => write!(f, " {full:8.0} {matrix:13.0}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::targets;

    #[test]
    fn every_target_is_known_and_waves_follow_from_what_a_kernel_takes() {
        let of = |target, registers, lds| Unit::of(target).workgroups(&Kernel::taking(registers, lds));
        for target in &targets::ALL {
            assert_eq!(Unit::of(target.name).lanes == 64, target.stores_count_as_loads(), "{}", target.name);
        }
        // 64 registers: 8 waves on each of 4 SIMDs; 20 KiB of LDS leave three workgroups of four waves.
        assert_eq!((of("gfx942", 64, 0), of("gfx942", 64, 20 << 10)), (8, 3));
        // 100 registers take 120 of 1536: 12 waves on each of 2 SIMDs.
        assert_eq!((of("gfx1100", 100, 0), of("gfx1100", 100, 33 << 10)), (3, 1));
        assert_eq!(of("gfx906", 25, 0), 9);
    }
}
