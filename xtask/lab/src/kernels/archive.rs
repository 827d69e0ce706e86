//! Packs all code objects into the one file that the backend embeds.

use std::fs;
use std::path::PathBuf;

use rocmforge::backend::hip::kernels::objects::{Archive, ObjectError, PackedFrame, write_archive};
use xtask::error::{Error, Result};
use xtask::lookalike::sources;
use zstd::zstd_safe::CParameter;

use super::amd::Object;
use super::{recipe, targets};

/// Size limit: large files do not belong in a repository. 816 kernels for 15 targets take 10.6 MB.
const BYTES_MAX: usize = 12 << 20;

/// zstd's highest level: packed once, read often.
const LEVEL: i32 = 22;

/// 16 MiB: larger than any family.
const WINDOW_LOG: u32 = 24;

/// Path of the archive.
pub fn path() -> PathBuf {
    sources::dir().join("code-objects.bin")
}

/// Bytes of the archive. If `good`, they hold the digest of its sources.
pub fn pack(objects: &[Object], good: bool) -> Result<Vec<u8>> {
    let mut frames = Vec::new();
    let mut rest = objects;
    for family in targets::FAMILIES {
        let (members, others) = rest.split_at(family.min(rest.len()));
        rest = others;
        let body: Vec<u8> = members.iter().flat_map(|object| object.bytes.iter().copied()).collect();
        frames.push(PackedFrame {
            objects: members.iter().map(|o| (o.target.name.to_owned(), o.bytes.len() as u64)).collect(),
            packed: compress(&body)?,
        });
    }
    let digest = if good { recipe::digest()? } else { [0; 32] };
    let bytes = write_archive(&digest, &frames).map_err(broken)?;
    if bytes.len() > BYTES_MAX {
        return Err(Error::TooLarge { file: path(), bytes: bytes.len() as u64, max: BYTES_MAX as u64 });
    }
    Ok(bytes)
}

/// Compares each of `objects` with the kept archive.
///
/// # Errors
/// [`Error::Stale`], which names all differences.
pub fn compare(objects: &[Object]) -> Result<()> {
    let path = path();
    let bytes = fs::read(&path).map_err(Error::at(&path))?;
    let kept = Archive::parse(&bytes).map_err(broken)?;
    let mut found = Vec::new();
    for object in objects {
        let name = object.target.name;
        match kept.entries().find(|entry| entry.name == name) {
            None => found.push(format!("it has no object for {name}")),
            Some(entry) if entry.unpack().map_err(broken)? != object.bytes => {
                found.push(format!("the object for {name} differs"));
            }
            Some(_) => (),
        }
    }
    let is_target = |name: &str| targets::ALL.iter().any(|target| target.name == name);
    let gone = kept.entries().filter(|entry| !is_target(entry.name));
    found.extend(gone.map(|entry| format!("{} is no longer a target", entry.name)));
    if found.is_empty() { Ok(()) } else { Err(Error::Stale { file: path, what: found.join(", ") }) }
}

/// Checks, without a compiler, that the archive's own digest matches the present sources.
///
/// # Errors
/// [`Error::Stale`].
pub fn check_made_from() -> Result<()> {
    let path = path();
    let bytes = fs::read(&path).map_err(Error::at(&path))?;
    if *Archive::parse(&bytes).map_err(broken)?.digest() == recipe::digest()? {
        return Ok(());
    }
    Err(Error::Stale {
        file: path,
        what: "kernels, compiler or flags have changed since it was made, or the gates found faults".into(),
    })
}

fn broken(error: ObjectError) -> Error {
    Error::Unexpected { what: "the archive", text: error.to_string() }
}

fn compress(body: &[u8]) -> Result<Vec<u8>> {
    let mut compressor = zstd::bulk::Compressor::new(LEVEL).map_err(Error::io("zstd"))?;
    // Reaches far enough back to find a neighbour's copy of the same kernel.
    compressor.set_parameter(CParameter::WindowLog(WINDOW_LOG)).map_err(Error::io("zstd"))?;
    compressor.set_parameter(CParameter::EnableLongDistanceMatching(true)).map_err(Error::io("zstd"))?;
    compressor.compress(body).map_err(Error::io("zstd"))
}
