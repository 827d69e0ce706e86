//! Memory pressure, by systemd's protocol (systemd.io/MEMORY_PRESSURE): when memory is short, the daemon releases
//! memory that it can load again. Requests go on.
//!
//! `$MEMORY_PRESSURE_WATCH` names the source: a pipe, or a file of the kernel's pressure stall information, into which
//! `$MEMORY_PRESSURE_WRITE` is written first; `/dev/null` turns watching off. Without the variable, the daemon watches
//! the kernel's file for its own control group, else for the whole machine. Before version 254, systemd does not set
//! it.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

/// Fires when some task waited for memory 200 ms of 2 s, as systemd's default does. Without privileges, windows must be
/// multiples of 2 s. The kernel needs the final zero byte.
const TRIGGER: &[u8] = b"some 200000 2000000\0";

/// Shortest time between two releases: a second one right after the first finds nothing.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };

/// Releases some memory, and returns a text that says which.
pub type Release = Box<dyn Fn() -> String + Send>;

/// A source of memory-pressure events.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    file: File,
    /// Poll events that signal pressure.
    events: PollFlags,
}

/// Why no source is watched.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The environment turns watching off.
    #[error("MEMORY_PRESSURE_WATCH is /dev/null")]
    SwitchedOff,
    /// The source is neither a pipe nor a file.
    #[error("{} is neither a pipe nor a file with an absolute path", path.display())]
    Kind {
        /// The path.
        path: PathBuf,
    },
    /// MEMORY_PRESSURE_WRITE cannot be decoded.
    #[error("MEMORY_PRESSURE_WRITE is not base64")]
    NotBase64,
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Os {
        /// The path.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: std::io::Error,
    },
}

/// The source that the environment names, else the kernel's.
///
/// # Errors
/// [`SourceError`].
pub fn source() -> Result<Source, SourceError> {
    let write = std::env::var_os("MEMORY_PRESSURE_WRITE");
    match std::env::var_os("MEMORY_PRESSURE_WATCH") {
        Some(path) => Source::named(path.into(), write),
        None => Source::own(),
    }
}

impl Source {
    /// Path of the source.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn named(path: PathBuf, write: Option<OsString>) -> Result<Self, SourceError> {
        if path == Path::new("/dev/null") {
            return Err(SourceError::SwitchedOff);
        }
        let kind = match rustix::fs::stat(&path) {
            Ok(stat) => FileType::from_raw_mode(stat.st_mode),
            Err(errno) => return Err(refused(&path)(errno)),
        };
        match kind {
            _ if !path.is_absolute() => Err(SourceError::Kind { path }),
            // Opened for writing too: so the pipe always has a writer and never reports end of file.
            FileType::Fifo => Self::open(path, &[], PollFlags::IN),
            FileType::RegularFile => {
                let write = write.map(|text| base64(text.as_encoded_bytes()).ok_or(SourceError::NotBase64));
                Self::open(path, &write.transpose()?.unwrap_or_default(), PollFlags::PRI)
            }
            _ => Err(SourceError::Kind { path }),
        }
    }

    /// The kernel's file for the daemon's control group, else for the machine.
    fn own() -> Result<Self, SourceError> {
        let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let group = groups.lines().find_map(|line| line.strip_prefix("0::/"));
        // The root group has no such file: it stands for the whole machine.
        let group = group.filter(|group| !group.is_empty());
        let group = group.map(|group| Path::new("/sys/fs/cgroup").join(group).join("memory.pressure"));
        let of_group = group.and_then(|path| Self::open(path, TRIGGER, PollFlags::PRI).ok());
        of_group.map_or_else(|| Self::open("/proc/pressure/memory".into(), TRIGGER, PollFlags::PRI), Ok)
    }

    fn open(path: PathBuf, write: &[u8], events: PollFlags) -> Result<Self, SourceError> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::open(&path, flags, Mode::empty()).map_err(refused(&path))?;
        if !write.is_empty() {
            rustix::io::write(&file, write).map_err(refused(&path))?;
        }
        Ok(Self { path, file: file.into(), events })
    }

    /// Reads what was written, so that one event fires once.
    fn drain(&self) {
        let mut bytes = [0; 512];
        if self.events == PollFlags::IN {
            while rustix::io::read(&self.file, &mut bytes).is_ok_and(|read| read > 0) {}
        }
    }
}

fn refused(path: &Path) -> impl Fn(Errno) -> SourceError {
    move |errno| SourceError::Os { path: path.into(), source: errno.into() }
}

/// A thread that waits for a [`Source`], until this drops.
#[derive(Debug)]
pub struct Watch {
    stop: Arc<OwnedFd>,
}

impl Watch {
    /// For each event of `source`, calls `told`, then all of `releases`.
    ///
    /// # Errors
    /// The operating system has no thread or no descriptor left.
    pub fn start(
        source: Source,
        told: impl Fn() + Send + 'static,
        releases: Vec<Release>,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let stopped = Arc::clone(&stop);
        let run = move || {
            while wait(&source, &stopped) {
                source.drain();
                told();
                let begun = Instant::now();
                let given: Vec<String> = releases.iter().map(|release| release()).collect();
                let elapsed_ms = Duration::as_millis(&begun.elapsed());
                tracing::info!(%elapsed_ms, "memory is short: released {}", given.join(", "));
                if is_stopped(&stopped, Some(&PAUSE)) {
                    break;
                }
            }
        };
        std::thread::Builder::new().name("pressure".into()).spawn(run)?;
        Ok(Self { stop })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
    }
}

/// Waits for an event. False when the watch was stopped or the source failed.
fn wait(source: &Source, stop: &OwnedFd) -> bool {
    loop {
        let mut fds =
            [PollFd::new(&source.file, source.events), PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => {
                tracing::warn!(%error, "memory pressure is no longer watched");
                return false;
            }
        }
        let [told, stopped] = fds.map(|fd| fd.revents());
        if !stopped.is_empty() {
            return false;
        }
        if told.contains(source.events) {
            return true;
        }
        if !told.is_empty() {
            tracing::warn!(path = %source.path.display(), ?told, "memory pressure is no longer watched");
            return false;
        }
    }
}

fn is_stopped(stop: &OwnedFd, patience: Option<&Timespec>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN)];
    poll(&mut fds, patience).is_ok_and(|ready| ready > 0)
}

/// Decodes base64; `None` if the text is invalid.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let text = text.trim_ascii_end();
    let digits = text.strip_suffix(b"==").or_else(|| text.strip_suffix(b"=")).unwrap_or(text);
    let mut out = Vec::new();
    for group in digits.chunks(4) {
        let mut bits = 0u32;
        for byte in group {
            let digit = match byte {
                b'A'..=b'Z' => byte - b'A',
                b'a'..=b'z' => byte - b'a' + 26,
                b'0'..=b'9' => byte - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            bits = bits << 6 | u32::from(digit);
        }
        let bytes = (bits << (6 * (4 - group.len()) + 8)).to_be_bytes();
        out.extend_from_slice(bytes.get(..(group.len() * 6 / 8))?);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trigger_comes_as_base64() {
        assert_eq!(base64(b"c29tZSAyMDAwMDAgMjAwMDAwMAA=").unwrap(), b"some 200000 2000000\0");
        assert_eq!(base64(b"YQ==").unwrap(), b"a");
        assert_eq!(base64(b"YWI=\n").unwrap(), b"ab");
        assert_eq!(base64(b"YWJj").unwrap(), b"abc");
        assert_eq!(base64(b"").unwrap(), b"");
        assert_eq!(base64(b"+/+/").unwrap(), [0xfb, 0xff, 0xbf]);
        assert_eq!(base64(b"Y!=="), None);
    }

    #[test]
    fn a_file_that_cannot_tell_is_refused_by_name() {
        let named = |path: &str| Source::named(path.into(), None).unwrap_err();
        assert!(matches!(named("/dev/null"), SourceError::SwitchedOff));
        assert!(matches!(named("/dev/zero"), SourceError::Kind { .. }));
        assert!(matches!(named("Cargo.toml"), SourceError::Kind { .. }));
        assert!(named("/nowhere/memory.pressure").to_string().starts_with("/nowhere/memory.pressure: "));
        let file = tempfile::NamedTempFile::new().unwrap();
        let broken = Source::named(file.path().into(), Some("?".into()));
        assert!(matches!(broken, Err(SourceError::NotBase64)));
        Source::named(file.path().into(), Some("YWI=".into())).unwrap();
        assert_eq!(std::fs::read(file.path()).unwrap(), b"ab");
    }
}
