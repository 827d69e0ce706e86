//! A device to run kernels on: the one that was asked for, never another.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use rocmforge::backend::hip::{
    ArenaOptions, Buffer, Device, DeviceOptions, Owner, Runtime, Stream, StreamPriority,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::common::skip;

/// What the CPU look-alike says it is.
const LOOKALIKE: &str = "ROCmForge CPU look-alike";

/// A device and a stream on it.
pub struct Rig {
    pub device: Device,
    pub stream: Stream,
}

/// The rig of this process; `None` after saying that the test is skipped. Memory comes in allocations of their own, so that
/// a look-alike sees every access that leaves its buffer.
pub fn rig() -> Option<&'static Rig> {
    static RIG: OnceLock<Option<Rig>> = OnceLock::new();
    let found = RIG.get_or_init(|| open(ArenaOptions { chunk_bytes: 0, ..ArenaOptions::default() }));
    if found.is_none() {
        skip(&why_not());
    }
    found.as_ref()
}

/// A rig of its own with these options; `None` after [`skip`].
pub fn rig_with(arena: ArenaOptions) -> Option<Rig> {
    let found = open(arena);
    if found.is_none() {
        skip(&why_not());
    }
    found
}

fn why_not() -> String {
    "no HIP runtime is named in ROCMFORGE_HIP_LIB, and clang++-22 for the look-alike is missing".into()
}

fn open(arena: ArenaOptions) -> Option<Rig> {
    let runtime = match named() {
        Some(path) => Runtime::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())),
        None => {
            let runtime = Runtime::open(lookalike()?).unwrap();
            let description = runtime.describe(0).unwrap();
            assert_eq!(description.name, LOOKALIKE, "the look-alike was built, something else answers");
            runtime
        }
    };
    let device = Device::open(&runtime, &DeviceOptions { arena, ..DeviceOptions::default() }).unwrap();
    let stream = device.stream(StreamPriority::High).unwrap();
    Some(Rig { device, stream })
}

/// The runtime that was asked for: without it tests fail and do not fall back.
fn named() -> Option<PathBuf> {
    std::env::var_os("ROCMFORGE_HIP_LIB").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// The CPU look-alike, built where it is missing or old; `None` without a compiler for it.
pub fn lookalike() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUILT
        .get_or_init(|| {
            Command::new("clang++-22").arg("--version").output().ok()?;
            let output = Command::new(env!("CARGO"))
                .args(["run", "--quiet", "--package", "xtask", "--", "kernels", "--lookalike"])
                .current_dir(env!("CARGO_MANIFEST_DIR"))
                .output()
                .expect("cargo can be run");
            let text = String::from_utf8_lossy(&output.stdout);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "the look-alike could not be built: {errors}");
            let path = text.lines().last().map(PathBuf::from).unwrap_or_default();
            assert!(path.is_file(), "cargo xtask kernels --lookalike ends with the library's path: {text}{errors}");
            Some(path)
        })
        .as_deref()
}

impl Rig {
    /// Device memory with these values.
    pub fn upload<T: IntoBytes + Immutable>(&self, values: &[T]) -> Buffer {
        let buffer = self.device.take(size_of_val(values), Owner::Scratch).unwrap();
        self.stream.upload(buffer.all(), values).unwrap();
        buffer
    }

    /// Device memory for `count` values, every byte 0xff: NaN as a float, so that what a kernel leaves out shows.
    pub fn output<T>(&self, count: usize) -> Buffer {
        let buffer = self.device.take(count * size_of::<T>(), Owner::Scratch).unwrap();
        self.stream.fill(buffer.all(), 0xff).unwrap();
        buffer
    }

    /// What is in it, after all work on the stream.
    pub fn download<T: FromBytes + IntoBytes + Clone>(&self, buffer: &Buffer) -> Vec<T> {
        assert_eq!(buffer.len() % size_of::<T>(), 0);
        let mut values = vec![T::new_zeroed(); buffer.len() / size_of::<T>()];
        self.stream.download(buffer.all(), values.as_mut_slice()).unwrap();
        values
    }
}
