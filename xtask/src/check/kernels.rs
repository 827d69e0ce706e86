//! Kernels: code objects as kept, the NVIDIA body, and the kernel tests on the CPU look-alike in all its variants.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use super::{Done, comgr};
use crate::error::{Error, Result};
use crate::kernels::{self, Variant};
use crate::{gpu_report, host};

/// Of the look-alike; the stage of all tests runs on waves of 32 lanes once more.
const VARIANTS: [Variant; 4] =
    [Variant::Wave32, Variant::Wave64, Variant::Wave32Sanitized, Variant::Wave64NoMatrix];

/// Targets that are compiled anew in each run; all 15 take seven minutes of two cores, and `cargo xtask kernels --check` does it.
const COMPILED: usize = 2;

/// That the archive was made, whole and past the gates, from what lies here, its digest says in a moment. That this is true, some
/// targets show in each run, compiled anew. Then the NVIDIA body; and AMD's own reader looks through all that is kept.
pub fn objects() -> Result<Done> {
    kernels::check_made_from()?;
    let kept = kernels::check(&kernels::drawn(COMPILED))?;
    println!("{}", kernels::build_nvidia()?.display());
    let read = comgr::run()?;
    Ok(Done { note: format!("{kept}; {}", read.note), skipped: read.skipped })
}

/// Runs the kernel tests on each variant, and counts what ran; then the report that owners of GPUs make, on one of them.
pub fn lookalike() -> Result<Done> {
    let report = host::target_dir().join("lookalike/launches");
    if report.exists() {
        fs::remove_file(&report).map_err(Error::at(&report))?;
    }
    for variant in VARIANTS {
        let library = kernels::build_lookalike(variant)?;
        println!("on {}", library.display());
        host::run(&mut tests_on(&library, variant, &report)?)?;
    }
    gpu_report::on_lookalike(&kernels::build_lookalike(Variant::Wave32)?)?;
    let launches = read_report(&report)?;
    for (kernel, count) in &launches {
        println!("{count:9} {kernel}");
    }
    let idle: Vec<&str> = launches.iter().filter(|(_, n)| **n == 0).map(|(name, _)| name.as_str()).collect();
    if !idle.is_empty() {
        return Err(Error::Untested { kernels: idle.join(", ") });
    }
    Ok(Done::note(format!("{} kernels, {} launches", launches.len(), launches.values().sum::<u64>())))
}

fn tests_on(library: &Path, variant: Variant, report: &Path) -> Result<Command> {
    let mut command = host::cargo();
    command
        .args(["test", "--quiet", "--workspace", "--test", "kernels"])
        .env("ROCMFORGE_HIP_LIB", library)
        .env("ROCMFORGE_LOOKALIKE_REPORT", report);
    if let Some(runtime) = kernels::sanitizer_runtime(variant)? {
        // The tests' own program is built without, so the runtime has to be there before it. Rust's runtime keeps some
        // memory to the end, which is no leak of ours.
        let runner = format!("env LD_PRELOAD={} ASAN_OPTIONS=detect_leaks=0", runtime.display());
        command.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", runner);
    }
    Ok(command)
}

/// Sums over all processes that appended to the report: a line holds a kernel's name and its launches.
fn read_report(path: &Path) -> Result<BTreeMap<String, u64>> {
    let text = fs::read_to_string(path).map_err(Error::at(path))?;
    let mut sums = BTreeMap::new();
    for line in text.lines() {
        let parsed = line.split_once(' ').and_then(|(name, n)| Some((name, n.parse::<u64>().ok()?)));
        let (name, launches) = parsed
            .ok_or_else(|| Error::Unexpected { what: "the look-alike's report", text: line.to_owned() })?;
        *sums.entry(name.to_owned()).or_default() += launches;
    }
    Ok(sums)
}
