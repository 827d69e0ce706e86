//! The gates: rejects code objects with spilled registers, scratch memory, too much LDS, arguments that differ from
//! Rust's packing, or narrow loads where weights stream.

use std::fs;
use std::path::Path;

use rmpv::Value;
use rocmforge::backend::hip::kernels::types::{WEIGHT_TYPES, WeightType};
use rocmforge::backend::hip::kernels::{ArgumentKind, Declaration, declared};
use xtask::error::{Error, Result};

use super::listing::loop_loads;
use super::note;
use super::targets::Target;

/// LDS that every GPU has for a workgroup.
const LDS_MAX: u64 = 64 << 10;

/// Kernels whose loops stream weights. Of the bytes that these loops load, at least [`WIDE_OF_100`] percent must be
/// loaded 16 at a time. The rest are scales, addresses and rows that are no multiple of 16 bytes. With codes loaded 8
/// or 4 bytes at a time, almost nothing would be wide. A type of two bits has only 8 bytes of codes for a lane, and as
/// many of signs and scales.
const STREAMS: [&str; 6] = ["gemv_", "gemm_q", "gemm_mxfp4", "gemm_iq", "gemm_tq", "probe_read"];
const WIDE_OF_100: u32 = 40;
const TWO_BITS_OF_100: u32 = 35;

/// Metadata of one kernel.
#[derive(Debug)]
pub struct Kernel {
    name: String,
    /// Spilled vector registers. Spilled scalar registers go into lanes of vector registers, or show as scratch
    /// memory.
    spills: u64,
    /// Bytes of scratch memory per lane.
    scratch: u64,
    lds: u64,
    arguments: Vec<Argument>,
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
        spills: number(kernel, ".vgpr_spill_count")?,
        scratch: number(kernel, ".private_segment_fixed_size")?,
        lds: number(kernel, ".group_segment_fixed_size")?,
        arguments,
    })
}

/// All faults of a code object.
pub fn faults(target: &Target, kernels: &[Kernel], listings: &Path, names: &[String]) -> Result<Vec<String>> {
    let mut faults = Vec::new();
    for kernel in kernels {
        resources(kernel, &mut faults);
    }
    arguments(target, kernels, &mut faults);
    for name in names {
        let path = listings.join(format!("{name}.s"));
        let text = fs::read_to_string(&path).map_err(Error::at(&path))?;
        wide_loads(&text, &mut faults);
    }
    Ok(faults.into_iter().map(|fault| format!("{}: {fault}", target.name)).collect())
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

fn wide_loads(listing: &str, faults: &mut Vec<String>) {
    for loads in loop_loads(listing) {
        if !STREAMS.iter().any(|prefix| loads.kernel.starts_with(prefix)) {
            continue;
        }
        let (wide, least, of_100) = if is_of_two_bits(&loads.kernel) {
            (loads.half, 8, TWO_BITS_OF_100)
        } else {
            (loads.wide, 16, WIDE_OF_100)
        };
        if wide * 100 < loads.all * of_100 || wide == 0 {
            faults.push(format!(
                "{} loads only {wide} of {} bytes in its loops {least} at a time",
                loads.kernel, loads.all
            ));
        }
    }
}
