//! Runs each test that needs a look-alike with its own settings again, in its own process.

use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rocmforge::backend::hip::{ArenaOptions, Device, DeviceOptions, Runtime};

use crate::common::skip;
use crate::rig::{is_lookalike, library};

const MARK: &str = "ROCMFORGE_TEST_FAULTS";

/// This process's side of a test.
pub enum Side {
    /// The child, with the path of the look-alike.
    Child(PathBuf),
    /// The parent, with the child's output.
    Parent(Output),
}

/// The child gets its side. The parent runs `test` in a child with `settings` of the look-alike; `None` after [`skip`].
pub fn side(test: &str, settings: &[(&str, &str)]) -> Option<Side> {
    if let Some(library) = std::env::var_os(MARK) {
        return Some(Side::Child(library.into()));
    }
    let library = library()?;
    if !Runtime::open(&library).is_ok_and(|runtime| is_lookalike(&runtime)) {
        skip(&format!("{} cannot inject faults", library.display()));
        return None;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(MARK, &library)
        .envs(settings.iter().map(|(name, value)| (format!("ROCMFORGE_LOOKALIKE_{name}"), value)))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("running 1 test"), "{test} is not the name of a test: {text}");
    Some(Side::Parent(output))
}

/// The child gets the look-alike's path. The parent runs `test` as [`side`] does, and panics if it fails.
pub fn child(test: &str, settings: &[(&str, &str)]) -> Option<PathBuf> {
    match side(test, settings)? {
        Side::Child(library) => Some(library),
        Side::Parent(output) => {
            let text = String::from_utf8_lossy(&output.stdout);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{test} failed in its child: {}\n{text}{errors}", output.status);
            None
        }
    }
}

/// The look-alike's first device.
pub fn open(library: &Path) -> Device {
    Device::open(&Runtime::open(library).unwrap(), &DeviceOptions::default()).unwrap()
}

/// The look-alike's device `index`, with each buffer as its own allocation.
pub fn open_plain(library: &Path, index: u32) -> Device {
    let arena = ArenaOptions { chunk_bytes: 0, ..ArenaOptions::default() };
    let options = DeviceOptions { index, arena, ..DeviceOptions::default() };
    Device::open(&Runtime::open(library).unwrap(), &options).unwrap()
}

/// Number of calls so far to the look-alike's function `name`.
pub fn calls(library: &Path, name: &str) -> u64 {
    let name = CString::new(name).unwrap();
    // SAFETY: the look-alike is loaded already, and this is the type of its function (tests/lookalike/cpu/api_test.cpp).
    #[allow(unsafe_code)]
    unsafe {
        let library = libloading::Library::new(library).unwrap();
        let count: libloading::Symbol<'_, extern "C" fn(*const c_char) -> u64> =
            library.get("rocmforge_lookalike_count").unwrap();
        count(name.as_ptr())
    }
}

/// Calls the look-alike's function `name`, which takes and returns nothing.
fn tell(library: &Path, name: &str) {
    // SAFETY: as above.
    #[allow(unsafe_code)]
    unsafe {
        let library = libloading::Library::new(library).unwrap();
        let function: libloading::Symbol<'_, extern "C" fn()> = library.get(name).unwrap();
        function();
    }
}

/// Releases all hung work.
pub fn release_hung(library: &Path) {
    tell(library, "rocmforge_lookalike_release_hung");
}

/// Makes failed devices work again.
pub fn heal(library: &Path) {
    tell(library, "rocmforge_lookalike_heal");
}
