//! Checks that AMD's own libraries can read the kept code objects, as far as possible without a GPU.
//!
//! comgr.py reads all of them with the library through which the HIP runtime reads code objects. It is a second
//! reader beside the gates, and not ours. Debian's version comes with Debian's runtime, which tests/gpu opens.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use rocmforge::backend::hip::kernels::objects::{Archive, ObjectError};
use rocmforge::backend::hip::kernels::{ArgumentKind, Declaration, declared};
use serde::Deserialize;
use xtask::check::Done;
use xtask::error::{Error, Result};
use xtask::host;

use crate::kernels::{self, targets};

/// Debian's packages of the runtime, newest first; each release has one of them. Each depends on the other libraries.
const PACKAGES: [&str; 3] = ["libamdhip64-7", "libamdhip64-6", "libamdhip64-5"];

/// Output of comgr.py.
#[derive(Deserialize)]
struct Report {
    version: String,
    takes_version_5: bool,
    kernels: usize,
    known: Vec<String>,
    unknown: Vec<String>,
    faults: Vec<String>,
}

/// Reads every object of kernels/code-objects.bin.
///
/// # Errors
/// [`Error::Gates`] with all faults; errors of the tools.
pub fn run() -> Result<Done> {
    host::ensure("python3", "python3")?;
    if let Err(error) = ensure_libraries() {
        return Ok(Done::skipped(format!("AMD's reader of code objects: {error}")));
    }
    let dir = tempfile::tempdir().map_err(Error::io("temporary directory"))?;
    write_objects(dir.path())?;
    let report = read(dir.path())?;
    if !report.faults.is_empty() {
        return Err(Error::Gates { faults: report.faults.join("\n  ") });
    }
    let Report { version, kernels, known, unknown, .. } = &report;
    let all = known.len() + unknown.len();
    println!("comgr {version}: {kernels} kernels with their arguments in each of {all} objects");
    println!("comgr {version} knows, and finds the objects for: {}", known.join(", "));
    if !unknown.is_empty() {
        println!(
            "comgr {version} does not know these targets, so it checked only their kernels and arguments: {}",
            unknown.join(", ")
        );
    }
    if !report.takes_version_5 {
        println!("comgr {version} does not read code objects of version 5: it was given these as version 4");
    }
    Ok(Done::note(format!("comgr {version} reads {all} objects, knows {} of the targets", known.len())))
}

fn ensure_libraries() -> Result<()> {
    let loads = || host::works(Command::new("python3").args(["-c", LOAD]));
    if loads() {
        return Ok(());
    }
    let known = |package: &&&str| host::works(Command::new("apt-cache").args(["show", package]));
    host::install(PACKAGES.iter().find(known).unwrap_or(&PACKAGES[2]))?;
    if loads() {
        return Ok(());
    }
    Err(Error::ToolMissing { program: "libamd_comgr".into(), package: "libamd-comgr2" })
}

/// Fails if one of the libraries is missing.
const LOAD: &str = "
import ctypes
def one(names):
    for name in names:
        try: return ctypes.CDLL(name)
        except OSError: pass
    raise SystemExit(1)
one(['libamd_comgr.so.3', 'libamd_comgr.so.2', 'libamd_comgr.so'])
one(['libamdhip64.so.8', 'libamdhip64.so.7', 'libamdhip64.so.6', 'libamdhip64.so', 'libamdhip64.so.5'])
";

/// Writes `<target>.co` for each object, and `<target>.json` with the kernels that Rust launches there.
fn write_objects(dir: &Path) -> Result<()> {
    let path = kernels::archive_path();
    let bytes = fs::read(&path).map_err(Error::at(&path))?;
    let broken = |error: ObjectError| Error::Unexpected { what: "the archive", text: error.to_string() };
    for entry in Archive::parse(&bytes).map_err(broken)?.entries() {
        let path = dir.join(format!("{}.co", entry.name));
        fs::write(&path, entry.unpack().map_err(broken)?).map_err(Error::at(&path))?;
    }
    for target in targets::ALL {
        let present = |kernel: &Declaration| target.unit().has(kernel.unit);
        write_launched(dir, target.name, declared().filter(present))?;
    }
    Ok(())
}

/// Writes the kernels that Rust launches on a target.
fn write_launched(dir: &Path, target: &str, kernels: impl Iterator<Item = Declaration>) -> Result<()> {
    let launched: BTreeMap<&str, Vec<(usize, usize, bool)>> = kernels
        .map(|kernel| {
            let arguments =
                kernel.arguments.iter().map(|a| (a.offset, a.size, a.kind == ArgumentKind::Pointer));
            (kernel.name, arguments.collect())
        })
        .collect();
    let path = dir.join(format!("{target}.json"));
    let text = serde_json::to_string(&launched)
        .map_err(|error| Error::Unexpected { what: "serde_json", text: error.to_string() })?;
    fs::write(&path, text).map_err(Error::at(&path))
}

fn read(dir: &Path) -> Result<Report> {
    let script = host::root().join("xtask/lab/src/stage/comgr.py");
    let text = host::read(Command::new("python3").arg(script).arg(dir))?;
    serde_json::from_str(&text)
        .map_err(|error| Error::Unexpected { what: "comgr.py", text: format!("{error}: {text}") })
}

#[cfg(test)]
mod unit {
    #![allow(clippy::expect_used)] // tests fail by panicking

    use super::*;

    /// Reads the objects with the correct list of launches, and with two tampered ones. Does not check that the kept
    /// objects are up to date.
    #[test]
    fn kernels_that_differ_are_found_and_so_is_a_wrong_target() {
        if !host::works(Command::new("python3").args(["-c", LOAD])) {
            eprintln!(
                "rocmforge-test-skipped: comgr: AMD's libraries are not installed (Debian package libamdhip64-5)"
            );
            assert!(!host::strict(), "may not be skipped here");
            return;
        }
        let dir = tempfile::tempdir().expect("a folder");
        write_objects(dir.path()).expect("the archive unpacks");
        let good = read(dir.path()).expect("a report");
        assert!(!good.faults.iter().any(|fault| fault.contains("probe_") || fault.contains(" is for ")));
        assert!(good.known.iter().any(|target| target == "gfx90a"), "{:?}", good.known);
        let targets = good.known.len() + good.unknown.len();

        for target in targets::ALL {
            let path = dir.path().join(format!("{}.json", target.name));
            let text = fs::read_to_string(&path).expect("written above");
            let mut launched: BTreeMap<String, Vec<(usize, usize, bool)>> =
                serde_json::from_str(&text).expect("written above");
            launched.get_mut("probe_copy").expect("a kernel")[2].1 = 4;
            launched.remove("probe_read");
            launched.insert("probe_nothing".into(), vec![]);
            fs::write(&path, serde_json::to_string(&launched).expect("written")).expect("written");
        }
        fs::rename(dir.path().join("gfx906.co"), dir.path().join("gfx908.co")).expect("both are there");
        let bad = read(dir.path()).expect("a report");
        let count = |words: &str| bad.faults.iter().filter(|fault| fault.contains(words)).count();
        assert_eq!(count("probe_copy takes"), targets - 1);
        assert_eq!(count("probe_read is in the object but never launched"), targets - 1);
        assert_eq!(count("probe_nothing is launched but not in the object"), targets - 1);
        assert_eq!(count("gfx908: is for amdgcn-amd-amdhsa--gfx906"), 1);
    }
}
