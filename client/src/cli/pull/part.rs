//! A file that is being fetched, beside the place that it will have. It gets its name when it is whole.

use std::fs::{self, File, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with, statvfs};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::PullError;
use super::source::Wanted;

/// Bytes of one read of a file that is there.
const READ_BYTES: usize = 1 << 20;

/// First bytes of every GGUF file.
pub const MAGIC: &[u8; 4] = b"GGUF";

/// Where the bytes of a part came from: another version of the file would not go on where they stop.
#[derive(Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
struct Origin {
    url: String,
    /// The server's name of the file's version.
    tag: Option<String>,
}

/// The bytes that are there. Nobody else writes to them, because the file is locked.
#[derive(Debug)]
pub struct Part {
    file: File,
    path: PathBuf,
    end: PathBuf,
    origin: Origin,
    hash: Sha256,
    bytes: u64,
}

fn at(path: &Path) -> impl FnOnce(std::io::Error) -> PullError {
    move |source| PullError::File { path: path.to_owned(), source }
}

/// The path with this text after its name.
fn with(path: &Path, text: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(text);
    name.into()
}

/// Digest and size of a file.
pub fn digest_of(path: &Path) -> Result<([u8; 32], u64), PullError> {
    let mut hash = Sha256::new();
    let bytes = File::open(path).and_then(|mut file| add(&mut hash, &mut file)).map_err(at(path))?;
    Ok((hash.finalize().into(), bytes))
}

/// Adds the rest of a file; returns its bytes.
fn add(hash: &mut Sha256, file: &mut File) -> std::io::Result<u64> {
    let mut buffer = vec![0; READ_BYTES];
    let mut bytes = 0;
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok(bytes);
        }
        hash.update(&buffer[..count]);
        bytes += count as u64;
    }
}

impl Part {
    /// Opens what is there of the file that will have the path `end`. Bytes of another origin are dropped.
    pub fn open(end: &Path, wanted: &Wanted) -> Result<Self, PullError> {
        let directory = end.parent().unwrap_or(end);
        fs::create_dir_all(directory).map_err(at(directory))?;
        let path = with(end, ".part");
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(at(&path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(PullError::InProgress { path: end.to_owned() }),
            Err(TryLockError::Error(error)) => return Err(at(&path)(error)),
        }
        if end.exists() {
            // The process that had the lock has finished it.
            return Err(PullError::Exists { path: end.to_owned(), other: false });
        }
        let mut hash = Sha256::new();
        let bytes = add(&mut hash, &mut file).map_err(at(&path))?;
        let mut part = Self { file, end: end.to_owned(), origin: Origin::default(), hash, bytes, path };
        part.origin = fs::read(part.origin_path())
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default();
        // With a known digest, bytes of any origin are worth going on with: at worst it is wrong in the end.
        let usable = part.origin.url == wanted.url && (part.origin.tag.is_some() || wanted.sha256.is_some());
        if !usable || wanted.bytes.is_some_and(|bytes| bytes < part.bytes) {
            part.restart()?;
        }
        Ok(part)
    }

    /// Bytes that are there.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// The server's name of the version that the bytes are of.
    pub fn tag(&self) -> Option<&str> {
        self.origin.tag.as_deref()
    }

    /// Remembers where the next bytes come from.
    pub fn comes_from(&mut self, url: &str, tag: Option<&str>) -> Result<(), PullError> {
        self.origin = Origin { url: url.to_owned(), tag: tag.map(str::to_owned) };
        let path = self.origin_path();
        let text = serde_json::to_vec(&self.origin).map_err(|error| at(&path)(error.into()))?;
        fs::write(&path, text).map_err(at(&path))
    }

    /// Drops what is there.
    pub fn restart(&mut self) -> Result<(), PullError> {
        self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0))).map_err(at(&self.path))?;
        (self.hash, self.bytes, self.origin) = (Sha256::new(), 0, Origin::default());
        Ok(())
    }

    /// Checks that the disk has room for so many bytes more.
    pub fn check_room(&self, need: u64) -> Result<(), PullError> {
        let directory = self.path.parent().unwrap_or(&self.path);
        let disk = statvfs(directory).map_err(|error| at(directory)(error.into()))?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if need > free {
            return Err(PullError::NoRoom { path: self.end.clone(), need, free });
        }
        Ok(())
    }

    /// Adds bytes. A file that cannot be a model is refused at its first bytes.
    pub fn write(&mut self, bytes: &[u8], url: &str) -> Result<(), PullError> {
        let begun = usize::try_from(self.bytes).unwrap_or(usize::MAX).min(MAGIC.len());
        let length = bytes.len().min(MAGIC.len() - begun);
        if bytes[..length] != MAGIC[begun..begun + length] {
            let found = String::from_utf8_lossy(&bytes[..bytes.len().min(16)]).into_owned();
            self.remove()?;
            return Err(PullError::NotAModel { url: url.to_owned(), found });
        }
        self.file.write_all(bytes).map_err(at(&self.path))?;
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Checks the whole file and gives it its name. A wrong one is deleted.
    pub fn finish(self, wanted: &Wanted) -> Result<([u8; 32], u64), PullError> {
        let found: [u8; 32] = self.hash.clone().finalize().into();
        let url = || wanted.url.clone();
        if let Some(bytes) = wanted.bytes.filter(|bytes| *bytes != self.bytes) {
            self.remove()?;
            return Err(PullError::Size { url: url(), found: self.bytes, wanted: bytes });
        }
        if let Some(wanted) = wanted.sha256.filter(|wanted| *wanted != found) {
            self.remove()?;
            return Err(PullError::Digest { url: url(), found, wanted });
        }
        if self.bytes < MAGIC.len() as u64 {
            self.remove()?;
            return Err(PullError::NotAModel { url: url(), found: String::new() });
        }
        self.file.sync_all().map_err(at(&self.path))?;
        self.rename()?;
        Ok((found, self.bytes))
    }

    /// Gives the part its name, unless that was taken meanwhile.
    fn rename(&self) -> Result<(), PullError> {
        let renamed = match renameat_with(CWD, &self.path, CWD, &self.end, RenameFlags::NOREPLACE) {
            // Some file systems do not know the flag.
            Err(Errno::INVAL | Errno::NOSYS) if !self.end.exists() => {
                fs::rename(&self.path, &self.end).map_err(at(&self.end))
            }
            renamed => renamed.map_err(|error| at(&self.end)(error.into())),
        };
        // It is absent if no byte came.
        let _ = fs::remove_file(self.origin_path());
        renamed
    }

    /// Leaves what is there for a later transfer; without a byte, nothing.
    pub fn leave(self) {
        if self.bytes == 0 {
            // The error that ended the transfer says more than one of this removal would.
            let _ = self.remove();
        }
    }

    /// Removes the part and what is known of it.
    fn remove(&self) -> Result<(), PullError> {
        let origin = self.origin_path();
        // It is absent if no byte came.
        let _ = fs::remove_file(origin);
        fs::remove_file(&self.path).map_err(at(&self.path))
    }

    fn origin_path(&self) -> PathBuf {
        with(&self.path, ".json")
    }
}
