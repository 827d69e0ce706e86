//! `cargo xtask kernels`: compiles the GPU kernels of `kernels/*.hip` for all platforms.
//!
//! Without options: builds code objects for every AMD target and checks them with the gates. They are written to
//! `target/kernels/` one by one, and together to `kernels/code-objects.bin`, which the backend embeds. One fixed
//! compiler version builds them, so that the same sources give the same bytes everywhere. A table says what became of the
//! kernels that decode steps spend their time in.

mod amd;
mod archive;
mod gates;
mod latency;
mod listing;
mod mutate;
mod note;
mod nvidia;
mod recipe;
mod table;
pub mod targets;
mod wheels;
mod zig;

use std::fs;
use std::path::PathBuf;
use std::time::SystemTime;

use xtask::error::{Error, Result};
use xtask::host;
use xtask::lookalike::{self, Variant};

pub use archive::{check_made_from, path as archive_path};
pub use nvidia::build as build_nvidia;

#[derive(clap::Args)]
pub struct Args {
    /// Compare with kernels/code-objects.bin, target by target; do not write it
    #[arg(long)]
    check: bool,
    /// Only these targets, into target/kernels/ only (gfx1100, gfx9-4-generic, ...)
    #[arg(long, value_delimiter = ',', value_name = "TARGET")]
    target: Vec<String>,
    /// Build libamdhip64 look-alikes that run the kernels on the CPU, into target/lookalike/
    #[arg(long, value_delimiter = ',', num_args = 0.., value_name = "VARIANT", conflicts_with = "check")]
    lookalike: Option<Vec<Variant>>,
    /// Build for NVIDIA GPUs, into target/nvidia/sm_90/
    #[arg(long, conflicts_with_all = ["check", "target", "lookalike"])]
    nvidia: bool,
    /// Change a number or operator in each kernel file (or those whose path contains FILE) and expect the kernel
    /// tests on the CPU to fail. Takes some seconds per change, a minute for a change that no test notices
    #[arg(long, value_delimiter = ',', num_args = 0.., value_name = "FILE", conflicts_with_all = ["check", "target", "lookalike", "nvidia"])]
    mutate: Option<Vec<String>>,
    /// Changes per file that compile to different code
    #[arg(long, default_value_t = 1, requires = "mutate")]
    rounds: usize,
}

/// Folder of built kernels.
pub fn dir() -> PathBuf {
    host::target_dir().join("kernels")
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    if let Some(variants) = &args.lookalike {
        return lookalike::build_all(variants);
    }
    if let Some(names) = &args.mutate {
        return mutate::run(names, args.rounds);
    }
    if args.nvidia {
        println!("{}", nvidia::build()?.display());
        return Ok(());
    }
    if args.check {
        println!("{}", check(&args.target)?);
        return Ok(());
    }
    let objects = amd::build(&targets::named(&args.target)?)?;
    table::print(&objects);
    objects.iter().for_each(|object| println!("{}", report(object)));
    if !args.target.is_empty() {
        return pass(&objects);
    }
    let bytes = archive::pack(&objects, is_good(&objects))?;
    let path = archive::path();
    fs::write(&path, &bytes).map_err(Error::at(&path))?;
    println!("{}: {} bytes, {} targets", path.display(), bytes.len(), objects.len());
    // Written in any case, so that a kernel under development can be tried. A faulty archive has a zero digest, so
    // the check refuses it.
    pass(&objects)
}

fn is_good(objects: &[amd::Object]) -> bool {
    objects.iter().all(|object| object.faults.is_empty())
}

/// Fails if the gates found faults.
fn pass(objects: &[amd::Object]) -> Result<()> {
    let faults: Vec<&str> = objects.iter().flat_map(|object| &object.faults).map(String::as_str).collect();
    if is_good(objects) { Ok(()) } else { Err(Error::Gates { faults: faults.join("\n  ") }) }
}

/// Names of `count` targets that vary from run to run.
pub fn drawn(count: usize) -> Vec<String> {
    let now = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as usize);
    let all = targets::ALL.len();
    let count = count.min(all);
    // As far apart as possible, because neighbours are of one family.
    (0..count).map(|number| targets::ALL[(now + number * all / count) % all].name.into()).collect()
}

/// Builds the named targets, or all, and compares them with the repository's archive. Returns a summary.
///
/// # Errors
/// [`Error::Gates`], [`Error::Stale`], errors of building.
pub fn check(names: &[String]) -> Result<String> {
    let objects = amd::build(&targets::named(names)?)?;
    table::print(&objects);
    pass(&objects)?;
    archive::compare(&objects)?;
    if names.is_empty() {
        check_made_from()?;
    }
    let kernels: usize = objects.iter().map(|object| object.kernels).sum();
    let made: Vec<&str> = objects.iter().map(|object| object.target.name).collect();
    let made = if names.is_empty() { format!("{} targets", made.len()) } else { made.join(", ") };
    Ok(format!("{made}: {kernels} kernels, equal to the archive"))
}

fn report(object: &amd::Object) -> String {
    format!("{:16} {:4} kernels {:9} bytes", object.target.name, object.kernels, object.bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_targets_are_different_ones_that_there_are() {
        let all = targets::ALL.len();
        for count in [1, 2, 4, all, all + 1] {
            let mut names = drawn(count);
            assert!(targets::named(&names).is_ok_and(|found| found.len() == count.min(all)), "{names:?}");
            names.sort();
            names.dedup();
            assert_eq!(names.len(), count.min(all));
        }
    }
}
