//! The folder of packages: what is in it, with digests.

use std::fmt::Write;
use std::fs;
use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

const SUMS: &str = "SHA256SUMS";

/// A file of the folder.
pub struct Written {
    pub name: String,
    pub bytes: u64,
    pub sha256: String,
}

/// Removes the packages of an earlier run: exactly the files that its list of digests names, and the list.
pub fn clear(out: &Path) -> Result<()> {
    let list = out.join(SUMS);
    let Ok(text) = fs::read_to_string(&list) else { return Ok(()) };
    let names = text.lines().filter_map(|line| Some(line.split_once("  ")?.1));
    for name in names.filter(|name| !name.contains('/')).chain([SUMS]) {
        match fs::remove_file(out.join(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::at(&out.join(name))(error));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Copies a file; returns its new name.
pub fn copy(from: &Path, to: &Path, name: &str) -> Result<String> {
    fs::copy(from, to).map_err(Error::at(from))?;
    Ok(name.to_owned())
}

/// Writes the digests of these files as sha256sum(1) does, and returns all files.
pub fn write(out: &Path, names: &[String]) -> Result<Vec<Written>> {
    let mut written = names.iter().map(|name| of(out, name)).collect::<Result<Vec<_>>>()?;
    written.sort_by(|a, b| a.name.cmp(&b.name));
    let mut text = String::new();
    for file in &written {
        let _ = writeln!(text, "{}  {}", file.sha256, file.name);
    }
    let path = out.join(SUMS);
    fs::write(&path, text).map_err(Error::at(&path))?;
    written.push(of(out, SUMS)?);
    Ok(written)
}

fn of(out: &Path, name: &str) -> Result<Written> {
    let path = out.join(name);
    let mut file = fs::File::open(&path).map_err(Error::at(&path))?;
    let (mut digest, mut bytes) = (Sha256::new(), 0);
    let mut piece = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut piece).map_err(Error::at(&path))?;
        if read == 0 {
            break;
        }
        digest.update(&piece[..read]);
        bytes += read as u64;
    }
    let mut sha256 = String::new();
    for byte in digest.finalize() {
        let _ = write!(sha256, "{byte:02x}");
    }
    Ok(Written { name: name.to_owned(), bytes, sha256 })
}
