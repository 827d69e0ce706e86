//! Writes a file as a whole: it appears under its name only when it is complete.

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use xtask::error::{Error, Result};

/// Runs `fill` on a temporary file beside `path`, then renames that file to `path`. An existing file is replaced.
///
/// # Errors
/// [`Error::DiskFull`] before anything is written if the disk lacks room for `bytes`; [`Error::Io`]; those of `fill`. No
/// file is left then.
pub fn write(path: &Path, bytes: u64, fill: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let disk = rustix::fs::statvfs(dir).map_err(|error| Error::at(dir)(error.into()))?;
    if disk.f_bavail.saturating_mul(disk.f_frsize) < bytes {
        return Err(Error::DiskFull { dir: dir.into(), need_mib: bytes >> 20 });
    }
    let mut part = tempfile::Builder::new()
        .prefix(".rocmforge-")
        .suffix(".part")
        .permissions(Permissions::from_mode(0o666)) // reduced by the process's umask
        .tempfile_in(dir)
        .map_err(Error::at(dir))?;
    fill(part.as_file_mut()).map_err(|error| match error {
        Error::Io { source, .. } => Error::at(path)(source),
        other => other,
    })?;
    part.persist(path).map_err(|error| Error::at(path)(error.error))?;
    Ok(())
}
