//! All code objects as the one file that the backend embeds.

use std::path::PathBuf;

use rocmforge::backend::hip::objects::{PackedObject, write_archive};
use sha2::{Digest, Sha256};

use super::amd::Object;
use super::sources;
use crate::error::{Error, Result};

/// A repository is no place for large files.
const BYTES_MAX: usize = 8 << 20;

/// The highest there is: made once, read often.
const LEVEL: i32 = 22;

/// Where it is kept.
pub fn path() -> PathBuf {
    sources::dir().join("code-objects.bin")
}

/// Its bytes.
pub fn pack(objects: &[Object]) -> Result<Vec<u8>> {
    let mut digest = Sha256::new();
    let mut packed = Vec::new();
    for object in objects {
        digest.update(&object.bytes);
        packed.push(PackedObject {
            name: object.target.name.into(),
            packed: zstd::bulk::compress(&object.bytes, LEVEL).map_err(Error::io("zstd"))?,
            unpacked_bytes: object.bytes.len() as u64,
        });
    }
    let bytes = write_archive(&digest.finalize().into(), &packed)
        .map_err(|error| Error::Unexpected { what: "the archive", text: error.to_string() })?;
    if bytes.len() > BYTES_MAX {
        return Err(Error::TooLarge { file: path(), bytes: bytes.len() as u64, max: BYTES_MAX as u64 });
    }
    Ok(bytes)
}
