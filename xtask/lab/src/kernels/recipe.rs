//! One digest of everything that code objects are made from: sources without comments, compiler, flags, targets. The archive holds the
//! digest of its making, so that a stale archive is noticed without a compiler.

use std::fs;
use std::path::Path;

use sha2::{Digest, Sha256};
use xtask::error::{Error, Result};
use xtask::lookalike::sources;

use super::zig::Zig;
use super::{amd, targets};

/// The digest of the present sources.
///
/// # Errors
/// Errors of reading the sources.
pub fn digest() -> Result<[u8; 32]> {
    let mut parts = vec![Zig::salt()];
    for target in &targets::ALL {
        parts.push(target.name.into());
        parts.extend(amd::flags(target));
    }
    digest_of(&parts, &sources::dir())
}

fn digest_of(parts: &[String], dir: &Path) -> Result<[u8; 32]> {
    let mut hash = Sha256::new();
    // Each part is preceded by its length, so that no part can pass for two.
    let mut add = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    parts.iter().for_each(|part| add(part.as_bytes()));
    for path in sources::inputs(dir)? {
        let name = path.strip_prefix(dir).unwrap_or(&path);
        add(name.to_string_lossy().as_bytes());
        let text = fs::read_to_string(&path).map_err(Error::at(&path))?;
        add(sources::without_comments(&text).as_bytes());
    }
    Ok(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_of_flags_names_or_bytes_shows_and_other_machines_preludes_do_not() {
        let dir = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().expect("in the folder")).expect("made");
            fs::write(path, text).expect("written");
        };
        let flags = ["-O3".to_owned()];
        let now = || digest_of(&flags, dir.path()).expect("read");
        write("a.hip", "a");
        write("gemv/b.h", "b");
        let first = now();
        write("prelude/nvidia.h", "for others");
        write("prelude/host_matrix.h", "for others");
        write("README.md", "for people");
        assert_eq!(now(), first);
        write("gemv/b.h", "c");
        let other_bytes = now();
        assert_ne!(other_bytes, first);
        write("gemv/b.h", "// A word on it.\n\nb // and another  \n");
        assert_eq!(now(), first, "comments make no code");
        write("gemv/b.h", "b");
        assert_eq!(now(), first);
        fs::rename(dir.path().join("a.hip"), dir.path().join("b.hip")).expect("renamed");
        assert_ne!(now(), first);
        fs::rename(dir.path().join("b.hip"), dir.path().join("a.hip")).expect("renamed");
        assert_ne!(digest_of(&["-O".into(), "3".into()], dir.path()).expect("read"), first);
    }
}
