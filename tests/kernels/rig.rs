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

/// What can compile it, as `cargo xtask kernels` looks for them.
const COMPILERS: [&str; 4] = ["clang++-22", "clang++-21", "clang++-20", "clang++-19"];

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
    format!(
        "no HIP runtime is named in ROCMFORGE_HIP_LIB, and for the look-alike one of {} is missing",
        COMPILERS.join(", ")
    )
}

/// The file of the runtime that tests run on: the one that was asked for, else the look-alike; `None` after [`skip`].
pub fn library() -> Option<PathBuf> {
    let found = named().or_else(|| lookalike().map(PathBuf::from));
    if found.is_none() {
        skip(&why_not());
    }
    found
}

/// Whether `runtime` is the CPU look-alike.
pub fn is_lookalike(runtime: &Runtime) -> bool {
    runtime.describe(0).is_ok_and(|description| description.name == LOOKALIKE)
}

fn open(arena: ArenaOptions) -> Option<Rig> {
    let runtime = match named() {
        Some(path) => Runtime::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())),
        None => {
            let runtime = Runtime::open(lookalike()?).unwrap();
            assert!(is_lookalike(&runtime), "the look-alike was built, something else answers");
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
            COMPILERS.iter().find(|compiler| Command::new(compiler).arg("--version").output().is_ok())?;
            // Waves of 32 lanes, unless the environment names another of its variants.
            let variant = std::env::var("ROCMFORGE_LOOKALIKE_VARIANT").unwrap_or_else(|_| "wave32".into());
            let output = Command::new(env!("CARGO"))
                .args(["run", "--quiet", "--package", "xtask", "--", "kernels", "--lookalike", &variant])
                .current_dir(env!("CARGO_MANIFEST_DIR"))
                .output()
                .expect("cargo can be run");
            let text = String::from_utf8_lossy(&output.stdout);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "the look-alike could not be built: {errors}");
            let path = text.lines().last().map(PathBuf::from).unwrap_or_default();
            assert!(
                path.is_file(),
                "cargo xtask kernels --lookalike ends with the library's path: {text}{errors}"
            );
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
