//! The AMD targets that kernels are built for.

use rocmforge::backend::hip::kernels::MatrixUnit;
use xtask::error::{Error, Result};

/// An architecture as clang names it.
#[derive(Debug)]
pub struct Target {
    pub name: &'static str,
    /// 4 for targets of ROCm 5.2, whose runtime refuses 5; 5 for later targets; 6 for generic targets, which require
    /// it.
    pub code_object_version: u32,
}

const fn early(name: &'static str) -> Target {
    Target { name, code_object_version: 4 }
}

const fn exact(name: &'static str) -> Target {
    Target { name, code_object_version: 5 }
}

const fn generic(name: &'static str) -> Target {
    Target { name, code_object_version: 6 }
}

impl Target {
    /// Whether one counter of its devices counts loads and stores of vectors.
    pub fn stores_count_as_loads(&self) -> bool {
        self.name.starts_with("gfx9")
    }

    /// The matrix unit of its devices that the kernels use (`HAS_MATRIX_UNIT` of kernels/prelude/amd.h).
    pub fn unit(&self) -> MatrixUnit {
        match self.name {
            "gfx906" | "gfx1030" | "gfx10-3-generic" => MatrixUnit::None,
            _ => MatrixUnit::OfWave,
        }
    }
}

/// Targets with almost the same code are adjacent. The rest of gfx9 (Vega 10, its APUs) has no dot products of four
/// bytes and no matrix unit: not worth an object.
pub const ALL: [Target; 15] = [
    early("gfx906"),
    early("gfx908"),
    early("gfx90a"),
    exact("gfx942"),
    exact("gfx950"),
    generic("gfx9-4-generic"),
    early("gfx1030"),
    generic("gfx10-3-generic"),
    exact("gfx1100"),
    exact("gfx1101"),
    exact("gfx1151"),
    generic("gfx11-generic"),
    exact("gfx1200"),
    exact("gfx1201"),
    generic("gfx12-generic"),
];

/// How many of [`ALL`] the archive packs together, one family after the other. A family stores its common parts once.
pub const FAMILIES: [usize; 5] = [1, 5, 2, 4, 3];

/// The targets with these names, or all if `names` is empty.
pub fn named(names: &[String]) -> Result<Vec<&'static Target>> {
    if names.is_empty() { Ok(ALL.iter().collect()) } else { names.iter().map(|name| find(name)).collect() }
}

/// The target called `name`.
fn find(name: &str) -> Result<&'static Target> {
    ALL.iter().find(|target| target.name == name).ok_or_else(|| Error::UnknownTarget {
        name: name.into(),
        known: ALL.iter().map(|target| target.name).collect::<Vec<_>>().join(", "),
    })
}
