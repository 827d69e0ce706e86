//! A file system whose server can be told to stop answering: FUSE, spoken over /dev/fuse itself.
//!
//! It has one directory of files that can only be read. A stopped server takes no request out of the device, so that a
//! thread that waits for an answer can still be killed. Mounting needs root. The kernel forgets nothing on its own here:
//! each look-up and each `stat` asks again.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

const ROOT: u64 = 1;
const FILE_MODE: u32 = 0o100_444;
const DIRECTORY_MODE: u32 = 0o040_555;

/// Bytes of a request at most: the kernel wants room for 8 KiB.
const REQUEST_BYTES: usize = 64 << 10;

/// Error numbers as the protocol sends them.
const NOT_FOUND: i32 = -2;
const NOT_KNOWN: i32 = -38;

/// A mounted file system; it goes when this drops, and all who wait for it get an error then.
pub struct HangingFs {
    at: PathBuf,
    state: Arc<Mutex<State>>,
    server: Option<JoinHandle<()>>,
}

struct State {
    /// Files by name, with their time of change in seconds; a file's number is 2 and its place.
    files: BTreeMap<String, (Vec<u8>, u64)>,
    answers: bool,
    /// Stops once that many bytes were read.
    bytes_left: Option<usize>,
    /// Waits so long before each read.
    delay: Duration,
    ended: bool,
}

impl HangingFs {
    /// Mounts these files at `at`; all users may read them.
    ///
    /// # Errors
    /// The machine has no FUSE, or mounting is not permitted.
    pub fn mount(at: &Path, files: &[(&str, &[u8])]) -> io::Result<Self> {
        let device = open_device(at)?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        let options = std::ffi::CString::new(options)?;
        mount("hanging", at, "fuse", MountFlags::NODEV | MountFlags::NOSUID, options.as_c_str())?;
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), (bytes.to_vec(), 1))).collect();
        let state = State { files, answers: true, bytes_left: None, delay: Duration::ZERO, ended: false };
        let state = Arc::new(Mutex::new(state));
        let served = Arc::clone(&state);
        let server = std::thread::spawn(move || serve(&device, &served));
        Ok(Self { at: at.to_owned(), state, server: Some(server) })
    }

    /// From now on, nobody gets an answer.
    pub fn hang(&self) {
        self.state().answers = false;
    }

    /// From now on, it answers again, and first those who wait.
    pub fn answer(&self) {
        (self.state().answers, self.state().bytes_left) = (true, None);
    }

    /// Stops answering once that many more bytes were read.
    pub fn hang_after(&self, bytes: usize) {
        self.state().bytes_left = Some(bytes);
    }

    /// Waits so long before it answers a read.
    pub fn delay_reads(&self, delay: Duration) {
        self.state().delay = delay;
    }

    /// Replaces a file's bytes, and its time of change.
    pub fn replace(&self, name: &str, bytes: &[u8]) {
        let mut state = self.state();
        let file = state.files.entry(name.to_owned()).or_default();
        *file = (bytes.to_vec(), file.1 + 1);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Drop for HangingFs {
    fn drop(&mut self) {
        self.state().ended = true;
        // Ends the connection, which fails all waiting requests, and takes the mount away even if it is in use.
        let _ = unmount(&self.at, UnmountFlags::FORCE | UnmountFlags::DETACH);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The device, also in a root directory without one.
fn open_device(beside: &Path) -> io::Result<File> {
    let open = |path: &Path| {
        let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits();
        File::options().read(true).write(true).custom_flags(flags as i32).open(path)
    };
    match open(Path::new("/dev/fuse")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let own = beside.with_extension("device");
            let made = mknodat(
                CWD,
                &own,
                FileType::CharacterDevice,
                Mode::RUSR | Mode::WUSR,
                rustix::fs::makedev(10, 229),
            );
            made.map_err(io::Error::from).and_then(|()| open(&own))
        }
        opened => opened,
    }
}

/// Answers requests until the file system is unmounted.
fn serve(device: &File, state: &Mutex<State>) {
    let mut request = vec![0; REQUEST_BYTES];
    let pause = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
    loop {
        let mut ready = [PollFd::from_borrowed_fd(device.as_fd(), PollFlags::IN)];
        let _ = poll(&mut ready, Some(&pause));
        // Held while a request is read and answered: after `hang` returns, no request leaves the device.
        let mut state = lock(state);
        if state.ended {
            return;
        }
        if !state.answers {
            drop(state);
            std::thread::sleep(Duration::from_millis(5));
            continue;
        }
        match rustix::io::read(device, &mut request) {
            Ok(read) => {
                if let Some((unique, answer)) = state.answer(&request[..read]) {
                    send(device, unique, answer);
                }
            }
            Err(rustix::io::Errno::NODEV) => return, // unmounted
            Err(_) => {}
        }
    }
}

fn send(device: &File, unique: u64, answer: Result<Vec<u8>, i32>) {
    let (error, body) = match answer {
        Ok(body) => (0, body),
        Err(error) => (error, Vec::new()),
    };
    let mut frame = Bytes::default();
    frame.u32(16 + body.len() as u32).u32(error as u32).u64(unique);
    frame.0.extend_from_slice(&body);
    let _ = rustix::io::write(device, &frame.0); // fails if nobody waits any more
}

/// Little helper to lay out structures.
#[derive(Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn u16(&mut self, value: u16) -> &mut Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

impl State {
    /// The answer to a request, with the request's number; `None` if it wants none.
    fn answer(&mut self, request: &[u8]) -> Option<(u64, Result<Vec<u8>, i32>)> {
        let (code, unique, node) = (u32_at(request, 4), u64_at(request, 8), u64_at(request, 16));
        let body = &request[40..];
        let mut out = Bytes::default();
        let answer = match code {
            1 => self.look_up(body),    // LOOKUP
            2 | 36 | 42 => return None, // FORGET, INTERRUPT, BATCH_FORGET
            3 => self.attributes(node).map(|bytes| {
                // GETATTR
                out.u64(0).u64(0);
                out.0.extend_from_slice(&bytes);
                out.0
            }),
            14 | 27 => {
                // OPEN, OPENDIR
                out.u64(0).u64(0);
                Ok(out.0)
            }
            15 => self.read(node, u64_at(body, 8), u32_at(body, 16)), // READ
            28 => Ok(self.names(u64_at(body, 8), u32_at(body, 16))),  // READDIR
            17 => Ok(vec![0; 80]),                                    // STATFS
            18 | 25 | 29 | 34 | 38 => Ok(Vec::new()), // RELEASE, FLUSH, RELEASEDIR, ACCESS, DESTROY
            26 => {
                // INIT
                out.u32(7).u32(31).u32(u32_at(body, 8)).u32(0).u16(16).u16(12).u32(4096).u32(1).u16(0).u16(0);
                out.0.resize(64, 0);
                Ok(out.0)
            }
            _ => Err(NOT_KNOWN),
        };
        Some((unique, answer))
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.files.keys().position(|other| other == name).map(|place| place as u64 + 2)
    }

    fn file(&self, node: u64) -> Option<&(Vec<u8>, u64)> {
        self.files.values().nth(usize::try_from(node).ok()?.checked_sub(2)?)
    }

    fn look_up(&self, name: &[u8]) -> Result<Vec<u8>, i32> {
        let name = std::str::from_utf8(name.strip_suffix(b"\0").unwrap_or(name)).map_err(|_| NOT_FOUND)?;
        let node = self.number(name).ok_or(NOT_FOUND)?;
        let mut out = Bytes::default();
        out.u64(node).u64(0).u64(0).u64(0).u64(0); // valid for no time
        out.0.extend_from_slice(&self.attributes(node)?);
        Ok(out.0)
    }

    fn attributes(&self, node: u64) -> Result<Vec<u8>, i32> {
        let (mode, size, time) = match self.file(node) {
            Some((bytes, time)) => (FILE_MODE, bytes.len() as u64, *time),
            None if node == ROOT => (DIRECTORY_MODE, 0, 1),
            None => return Err(NOT_FOUND),
        };
        let mut out = Bytes::default();
        out.u64(node).u64(size).u64(size.div_ceil(512)).u64(time).u64(time).u64(time).u32(0).u32(0).u32(0);
        out.u32(mode).u32(1).u32(0).u32(0).u32(0).u32(4096).u32(0);
        Ok(out.0)
    }

    fn read(&mut self, node: u64, offset: u64, size: u32) -> Result<Vec<u8>, i32> {
        std::thread::sleep(self.delay);
        let (bytes, _) = self.file(node).ok_or(NOT_FOUND)?;
        let start = (offset as usize).min(bytes.len());
        let end = (start + size as usize).min(bytes.len());
        let read = bytes[start..end].to_vec();
        if let Some(left) = &mut self.bytes_left {
            *left = left.saturating_sub(read.len());
            self.answers = *left > 0;
        }
        Ok(read)
    }

    /// Entries of the directory from that one on.
    fn names(&self, from: u64, size: u32) -> Vec<u8> {
        let mut out = Bytes::default();
        for (place, name) in self.files.keys().enumerate().skip(from as usize) {
            let length = (24 + name.len()).next_multiple_of(8);
            if out.0.len() + length > size as usize {
                break;
            }
            let end = out.0.len() + length;
            out.u64(place as u64 + 2).u64(place as u64 + 1).u32(name.len() as u32).u32(8);
            out.0.extend_from_slice(name.as_bytes());
            out.0.resize(end, 0);
        }
        out.0
    }
}
