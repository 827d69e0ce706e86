//! The gates. They reject code objects with spilled registers, scratch memory, too much LDS, or arguments that differ from
//! Rust's packing. They reject narrow loads where weights stream, and loops that wait for the loads that they have just
//! issued. Each access must say which memory it goes to.

use rmpv::Value;
use rocmforge::backend::hip::kernels::types::{WEIGHT_TYPES, WeightType};
use rocmforge::backend::hip::kernels::{ArgumentKind, Declaration, declared};
use xtask::error::{Error, Result};

use super::latency::{Pass, streaming_pass};
use super::listing::{self, loop_loads};
use super::note;
use super::targets::Target;

/// LDS that every GPU has for a workgroup.
const LDS_MAX: u64 = 64 << 10;

/// Kernels whose loops stream weights. Of the bytes that these loops load, at least [`WIDE_OF_100`] percent must be
/// loaded 16 at a time. The rest are scales, addresses and rows that are no multiple of 16 bytes. With codes loaded 8
/// or 4 bytes at a time, almost nothing would be wide. A type of two bits has only 8 bytes of codes for a lane, and as
/// many of signs and scales.
const STREAMS: [&str; 7] = ["gemv_", "gemm_q", "gemm_mxfp", "gemm_nvfp4", "gemm_iq", "gemm_tq", "probe_read"];
const WIDE_OF_100: u32 = 40;
const TWO_BITS_OF_100: u32 = 35;
/// Latencies of a usual pass of these loops for 8-bit activations: while a step is multiplied, the next one loads. A pass that waits
/// for the newest of its loads has more.
const LATENCIES_MAX: f64 = 1.0;
/// Types that may wait for two: Q2_K on all targets; MXFP4 on gfx908 and gfx950; 6-bit floats with many rows. On gfx906, gfx908 and
/// gfx950 they wait with one row, too.
const WAITS_TWICE: [&str; 3] = ["_q2_k_", "_mxfp4_", "_mxfp6_"];

/// Metadata of one kernel.
#[derive(Debug)]
pub struct Kernel {
    pub name: String,
    /// Vector registers of a lane, with those of the matrix unit where both come out of one file.
    pub registers: u32,
    /// Spilled vector registers. Spilled scalar registers go into lanes of vector registers, or show as scratch
    /// memory.
    spills: u64,
    /// Bytes of scratch memory per lane.
    scratch: u64,
    pub lds: u64,
    /// Most threads of a workgroup.
    pub threads: u32,
    arguments: Vec<Argument>,
}

#[cfg(test)]
impl Kernel {
    /// A kernel without arguments that takes these registers and this much LDS.
    pub fn taking(registers: u32, lds: u64) -> Self {
        Self { name: "taking".into(), registers, spills: 0, scratch: 0, lds, threads: 256, arguments: vec![] }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Argument {
    offset: u64,
    size: u64,
    pointer: bool,
}

/// The kernels of joined metadata.
pub fn kernels(metadata: &Value) -> Result<Vec<Kernel>> {
    let list = note::kernels(metadata).unwrap_or_default();
    let unreadable =
        || Error::Unexpected { what: "the metadata of a code object", text: "a field is missing".into() };
    list.iter().map(|kernel| read(kernel).ok_or_else(unreadable)).collect()
}

fn read(kernel: &Value) -> Option<Kernel> {
    let number = |map: &Value, key: &str| note::field(map, key)?.as_u64();
    let mut arguments = Vec::new();
    for argument in note::field(kernel, ".args").and_then(Value::as_array).into_iter().flatten() {
        let kind = note::field(argument, ".value_kind")?.as_str()?;
        // The runtime fills in hidden arguments itself.
        if kind.starts_with("hidden_") {
            continue;
        }
        arguments.push(Argument {
            offset: number(argument, ".offset")?,
            size: number(argument, ".size")?,
            pointer: kind == "global_buffer",
        });
    }
    Some(Kernel {
        name: note::name(kernel)?.into(),
        registers: u32::try_from(number(kernel, ".vgpr_count")?).ok()?,
        spills: number(kernel, ".vgpr_spill_count")?,
        scratch: number(kernel, ".private_segment_fixed_size")?,
        lds: number(kernel, ".group_segment_fixed_size")?,
        threads: u32::try_from(number(kernel, ".max_flat_workgroup_size")?).ok()?,
        arguments,
    })
}

/// Faults in the metadata of a code object.
pub fn faults(target: &Target, kernels: &[Kernel]) -> Vec<String> {
    let mut faults = Vec::new();
    for kernel in kernels {
        resources(kernel, &mut faults);
    }
    arguments(target, kernels, &mut faults);
    named(target, faults)
}

/// Faults in the assembly of one kernel file.
pub fn faults_of_code(target: &Target, listing: &str) -> Vec<String> {
    let mut faults = Vec::new();
    for kernel in listing::kernels(listing) {
        known_memory(&kernel, &mut faults);
        if STREAMS.iter().any(|prefix| kernel.name.starts_with(prefix)) {
            wide_loads(&kernel, &mut faults);
            if kernel.name.contains("_a8") && !WAITS_TWICE.iter().any(|name| kernel.name.contains(name)) {
                loads_in_flight(target, &kernel, &mut faults);
            }
        }
    }
    named(target, faults)
}

fn named(target: &Target, faults: Vec<String>) -> Vec<String> {
    faults.into_iter().map(|fault| format!("{}: {fault}", target.name)).collect()
}

fn resources(kernel: &Kernel, faults: &mut Vec<String>) {
    let name = &kernel.name;
    if kernel.spills != 0 {
        faults.push(format!("{name} spills {} registers", kernel.spills));
    }
    if kernel.scratch != 0 {
        faults.push(format!("{name} uses {} bytes of scratch memory per lane", kernel.scratch));
    }
    if kernel.lds > LDS_MAX {
        faults.push(format!("{name} uses {} bytes of LDS; at most {LDS_MAX} are allowed", kernel.lds));
    }
}

fn arguments(target: &Target, kernels: &[Kernel], faults: &mut Vec<String>) {
    let present = |kernel: &Declaration| target.unit().has(kernel.unit);
    let all: Vec<Declaration> = declared().filter(present).collect();
    for declaration in &all {
        let Some(kernel) = kernels.iter().find(|kernel| kernel.name == declaration.name) else {
            faults.push(format!("{} is declared in Rust, but there is no such kernel", declaration.name));
            continue;
        };
        let packed: Vec<Argument> = declaration.arguments.iter().map(packed).collect();
        if packed != kernel.arguments {
            faults.push(format!("{} takes {:?}, but Rust packs {packed:?}", kernel.name, kernel.arguments));
        }
    }
    for kernel in kernels.iter().filter(|kernel| !all.iter().any(|d| d.name == kernel.name)) {
        faults.push(format!("{} is not declared in Rust", kernel.name));
    }
}

fn packed(argument: &rocmforge::backend::hip::kernels::Argument) -> Argument {
    Argument {
        offset: argument.offset as u64,
        size: argument.size as u64,
        pointer: argument.kind == ArgumentKind::Pointer,
    }
}

/// Whether a kernel is of a type whose first plane has 8 bytes for a group, which a lane loads.
fn is_of_two_bits(kernel: &str) -> bool {
    let names = |known: &WeightType| kernel.contains(&format!("_{}_", known.dtype.name().to_lowercase()));
    WEIGHT_TYPES.iter().filter(|known| known.planes.first() == Some(&(8, 32))).any(names)
}

fn wide_loads(kernel: &listing::Kernel<'_>, faults: &mut Vec<String>) {
    let loads = loop_loads(kernel);
    let (wide, least, of_100) = if is_of_two_bits(kernel.name) {
        (loads.half, 8, TWO_BITS_OF_100)
    } else {
        (loads.wide, 16, WIDE_OF_100)
    };
    if wide * 100 < loads.all * of_100 || wide == 0 {
        faults.push(format!(
            "{} loads only {wide} of {} bytes in its loops {least} at a time",
            kernel.name, loads.all
        ));
    }
}

/// Flat accesses take the counters of LDS too, so a wait for LDS waits for memory.
fn known_memory(kernel: &listing::Kernel<'_>, faults: &mut Vec<String>) {
    let flat = kernel.instructions().filter(|instruction| instruction.name.starts_with("flat_")).count();
    if flat > 0 {
        faults.push(format!("{} has {flat} accesses to memory that the compiler does not know", kernel.name));
    }
}

fn loads_in_flight(target: &Target, kernel: &listing::Kernel<'_>, faults: &mut Vec<String>) {
    let pass = streaming_pass(kernel, target.stores_count_as_loads());
    if let Some(pass) = pass.filter(|pass| pass.latencies > LATENCIES_MAX) {
        let Pass { bytes, latencies } = pass;
        faults.push(format!(
            "{} waits for {latencies:.2} loads one after another to load {bytes} bytes a lane in its loop",
            kernel.name
        ));
    }
}
