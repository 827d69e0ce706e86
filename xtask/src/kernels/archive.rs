//! All code objects as the one file that the backend embeds.

use std::path::PathBuf;

use rocmforge::backend::hip::objects::{PackedFrame, write_archive};
use sha2::{Digest, Sha256};
use zstd::zstd_safe::CParameter;

use super::amd::Object;
use super::{sources, targets};
use crate::error::{Error, Result};

/// A repository is no place for large files.
const BYTES_MAX: usize = 8 << 20;

/// The highest there is: made once, read often.
const LEVEL: i32 = 22;

/// 16 MiB: a family is smaller.
const WINDOW_LOG: u32 = 24;

/// Where it is kept.
pub fn path() -> PathBuf {
    sources::dir().join("code-objects.bin")
}

/// Its bytes.
pub fn pack(objects: &[Object]) -> Result<Vec<u8>> {
    let mut digest = Sha256::new();
    let mut frames = Vec::new();
    let mut rest = objects;
    for family in targets::FAMILIES {
        let (members, others) = rest.split_at(family.min(rest.len()));
        rest = others;
        let body: Vec<u8> = members.iter().flat_map(|object| object.bytes.iter().copied()).collect();
        digest.update(&body);
        frames.push(PackedFrame {
            objects: members.iter().map(|o| (o.target.name.to_owned(), o.bytes.len() as u64)).collect(),
            packed: compress(&body)?,
        });
    }
    let bytes = write_archive(&digest.finalize().into(), &frames)
        .map_err(|error| Error::Unexpected { what: "the archive", text: error.to_string() })?;
    if bytes.len() > BYTES_MAX {
        return Err(Error::TooLarge { file: path(), bytes: bytes.len() as u64, max: BYTES_MAX as u64 });
    }
    Ok(bytes)
}

fn compress(body: &[u8]) -> Result<Vec<u8>> {
    let mut compressor = zstd::bulk::Compressor::new(LEVEL).map_err(Error::io("zstd"))?;
    // Far enough back to find the neighbour's copy of the same kernel.
    compressor.set_parameter(CParameter::WindowLog(WINDOW_LOG)).map_err(Error::io("zstd"))?;
    compressor.set_parameter(CParameter::EnableLongDistanceMatching(true)).map_err(Error::io("zstd"))?;
    compressor.compress(body).map_err(Error::io("zstd"))
}
