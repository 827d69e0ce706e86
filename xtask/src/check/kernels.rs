//! The kernel tests on variants of the CPU look-alike.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use super::{Done, Form, stage};
use crate::error::{Error, Result};
use crate::host;
use crate::lookalike::{self, Variant};

/// Variants of the look-alike. The stage `tests` runs on waves of 32 lanes, so the short form does not.
const SHORT: [Variant; 1] = [Variant::Wave64];
const LONG: [Variant; 4] =
    [Variant::Wave32, Variant::Wave64, Variant::Wave32Sanitized, Variant::Wave64NoMatrix];

/// Runs the kernel tests on each variant and counts the launches. The long form then makes the GPU owners' report on
/// one variant.
pub fn run(form: Form) -> Result<Done> {
    let variants: &[Variant] = if form == Form::Long { &LONG } else { &SHORT };
    let report = host::target_dir().join("lookalike/launches");
    if report.exists() {
        fs::remove_file(&report).map_err(Error::at(&report))?;
    }
    for &variant in variants {
        let library = lookalike::build(variant)?;
        println!("on {}", library.display());
        host::run(&mut tests_on(&library, variant, &report)?)?;
    }
    if form == Form::Long {
        stage("report", form)?;
    }
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
    if let Some(runtime) = lookalike::sanitizer_runtime(variant)? {
        // The tests' own program is built without the sanitizer, so its runtime must be loaded first. Rust's runtime
        // keeps some memory until the end, which is not a leak of ours.
        let runner = format!("env LD_PRELOAD={} ASAN_OPTIONS=detect_leaks=0", runtime.display());
        command.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", runner);
    }
    Ok(command)
}

/// Adds up the reports of all processes: each line holds a kernel's name and its launches.
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
