//! Metrics for Prometheus: to standard output, or to a file that is replaced atomically.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rocmforge_client::{Client, metrics, random_request_id};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, fchmod, openat, renameat, statat, unlinkat};
use rustix::io::Errno;
use serde::Serialize;

use super::report::{Failure, Output};

/// Mode of a new file: readable for all, whatever the umask.
const MODE_NEW: Mode = Mode::from_raw_mode(0o644);

/// Names tried for the temporary file. A second one is needed only if 128 random bits were guessed.
const NAMES_MAX: u32 = 4;

/// A page of metrics.
#[derive(Debug, Serialize)]
struct Page {
    prometheus: String,
}

/// Writes the page once, or again after each period.
pub fn run(client: &Client, file: Option<&Path>, period: Option<u32>, output: Output) -> Result<(), Failure> {
    loop {
        let page = Page { prometheus: metrics::prometheus(&client.status()?, &client.residency()?) };
        match file {
            None => output.show(&page, |out, page| out.write_all(page.prometheus.as_bytes()))?,
            Some(file) => replace(file, &page.prometheus)
                .map_err(|error| Failure::File(format!("{}: {error}{}", file.display(), advice(&error))))?,
        }
        match period {
            None => return Ok(()),
            Some(seconds) => std::thread::sleep(Duration::from_secs(seconds.into())),
        }
    }
}

/// The way out of an error, if there is one.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => {
            "; its directory must be there: that of the node exporter comes with Debian's prometheus-node-exporter"
        }
        io::ErrorKind::PermissionDenied => "; write to a directory of your own, or as root",
        _ => "",
    }
}

/// Replaces the file by renaming, so that a reader sees the old page or the new one, whole. An existing file keeps its
/// mode.
///
/// The directory may belong to a user who plants files and links in it. So no link is followed, and only a file that
/// this call created is written.
fn replace(file: &Path, page: &str) -> io::Result<()> {
    let name = file.file_name().ok_or_else(|| io::Error::other("the path names no file"))?;
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags, Mode::empty())?;
    let mode = mode_of(&folder, name.as_ref())?;
    let (beside, created) = create_beside(&folder)?;
    let written =
        write_page(created, page, mode).and_then(|()| Ok(renameat(&folder, beside.as_str(), &folder, name)?));
    written.inspect_err(|_| {
        // If this fails too, the first error says more.
        let _ = unlinkat(&folder, beside.as_str(), AtFlags::empty());
    })
}

/// The mode for the new file. Anything but a regular file is refused. A rename would put a file in the place of a
/// device, a pipe or a link that others use.
fn mode_of(folder: &OwnedFd, name: &Path) -> io::Result<Mode> {
    let found = match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) => found,
        Err(Errno::NOENT) => return Ok(MODE_NEW),
        Err(errno) => return Err(errno.into()),
    };
    let kind = match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => return Ok(Mode::from_raw_mode(found.st_mode & 0o777)),
        FileType::Directory => "a directory",
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        _ => "a device",
    };
    let advice = "name a regular file, or leave --out away to print to standard output";
    Err(io::Error::other(format!("it is {kind}, not a regular file, and was left as it is: {advice}")))
}

/// Creates an empty file with a name that nobody can foresee. The collector looks for names that end in .prom; this one
/// does not.
fn create_beside(folder: &OwnedFd) -> io::Result<(String, File)> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut tried = 0;
    loop {
        let name = format!(".rocmforge-metrics.{:032x}", random_request_id());
        match openat(folder, name.as_str(), flags, Mode::RUSR | Mode::WUSR) {
            Ok(created) => return Ok((name, created.into())),
            Err(Errno::EXIST) if tried < NAMES_MAX => tried += 1,
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn write_page(mut file: File, page: &str, mode: Mode) -> io::Result<()> {
    file.write_all(page.as_bytes())?;
    Ok(fchmod(&file, mode)?)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use rustix::fs::{CWD, mknodat};

    use super::*;

    fn mode(file: &Path) -> u32 {
        fs::metadata(file).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_page_replaces_the_one_before_and_leaves_nothing_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("rocmforge.prom");
        for page in ["one\n", "two\n"] {
            replace(&file, page).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), page);
        }
        assert_eq!(mode(&file), 0o644);
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        replace(&file, "three\n").unwrap();
        assert_eq!(mode(&file), 0o600, "an existing file keeps its mode");
        let error = replace(&dir.path().join("none/rocmforge.prom"), "x").unwrap_err();
        assert!(advice(&error).contains("its directory must be there"), "{error}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the file alone");
    }

    #[test]
    fn only_a_regular_file_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("folder")).unwrap();
        fs::write(at("secret"), "kept").unwrap();
        symlink(at("secret"), at("link")).unwrap();
        mknodat(CWD, at("pipe"), FileType::Fifo, MODE_NEW, 0).unwrap();
        let cases = [
            (at("folder"), "a directory"),
            (at("link"), "a symbolic link"),
            (at("pipe"), "a pipe"),
            ("/dev/full".into(), "a device"),
        ];
        for (path, kind) in cases {
            let before = fs::symlink_metadata(&path).unwrap().file_type();
            let error = replace(&path, "x").unwrap_err().to_string();
            assert!(error.contains(&format!("it is {kind},")) && error.contains("--out"), "{error}");
            assert_eq!(fs::symlink_metadata(&path).unwrap().file_type(), before, "{path:?} was replaced");
        }
        assert_eq!(fs::read_to_string(at("secret")).unwrap(), "kept");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 4, "nothing is left beside them");
    }

    #[test]
    fn a_link_planted_for_the_temporary_file_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let secret = dir.path().join("secret");
        fs::write(&secret, "kept").unwrap();
        fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
        // The names that a process id makes foreseeable.
        let id = std::process::id();
        for name in [format!(".m.prom.{id}"), format!(".rocmforge-metrics.{id}")] {
            symlink(&secret, dir.path().join(name)).unwrap();
        }
        replace(&dir.path().join("m.prom"), "x").unwrap();
        assert_eq!((fs::read_to_string(&secret).unwrap().as_str(), mode(&secret)), ("kept", 0o600));
        // No two temporary files have the same name.
        let folder = OwnedFd::from(File::open(dir.path()).unwrap());
        let [first, second] = [(); 2].map(|()| create_beside(&folder).unwrap().0);
        assert_ne!(first, second);
    }
}
