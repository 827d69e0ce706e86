//! Descriptors that clients sent: closed on threads that may be lost.
//!
//! To close a file asks its server: FUSE sends a flush. Any user may send a descriptor of a server that never answers,
//! with any frame. A runtime thread that closed it would stand still, and there are two of them. A descriptor that is
//! never closed is lost to the process. So a user with many of them sends no more: the kernel drops them on arrival,
//! which asks no server.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::{Arc, LazyLock};

use super::{Aside, Limits};
use crate::lock::{Mutex, Rank};

/// The threads that close.
static CLOSER: LazyLock<Arc<Aside>> = LazyLock::new(|| Aside::new(Limits::default()));

/// Descriptors of each user that are being closed, or wait for that.
static CLOSING: LazyLock<Mutex<HashMap<u32, usize>>> =
    LazyLock::new(|| Mutex::new(Rank::Closing, HashMap::new()));

/// Most descriptors of one user that are being closed when it sends another. Local ones close within microseconds.
const CLOSING_MAX: usize = 32;

/// A descriptor from outside.
#[derive(Debug)]
pub struct ReceivedFd {
    fd: Option<File>,
    uid: u32,
}

/// A descriptor that is being closed. Fields drop in order: it counts until it is closed, which may take for ever.
struct Closing {
    _fd: File,
    _counted: Counted,
}

/// One of the user's in [`CLOSING`].
struct Counted(u32);

impl Closing {
    fn of(fd: File, uid: u32) -> Self {
        *CLOSING.lock().entry(uid).or_default() += 1;
        Self { _fd: fd, _counted: Counted(uid) }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut closing = CLOSING.lock();
        if let Some(count) = closing.get_mut(&self.0) {
            *count -= 1;
            if *count == 0 {
                closing.remove(&self.0);
            }
        }
    }
}

impl ReceivedFd {
    /// A descriptor that a user sent.
    pub fn of(fd: OwnedFd, uid: u32) -> Self {
        Self { fd: Some(File::from(fd)), uid }
    }

    /// False while too many descriptors of that user wait to be closed: then receive none.
    pub fn may_come_from(uid: u32) -> bool {
        CLOSING.lock().get(&uid).is_none_or(|count| *count < CLOSING_MAX)
    }

    /// Descriptors that are being closed or wait for that, of all users.
    pub fn closing() -> usize {
        CLOSING.lock().values().sum()
    }

    /// Number of threads that are lost because they closed one.
    pub fn lost_threads() -> usize {
        CLOSER.lost()
    }

    /// The descriptor itself: from now on the caller closes it. `None` never happens.
    pub fn into_file(mut self) -> Option<File> {
        self.fd.take()
    }

    /// The open file. `None` never happens.
    pub fn file(&self) -> Option<&File> {
        self.fd.as_ref()
    }
}

impl Drop for ReceivedFd {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            CLOSER.let_go(format!("uid {}", self.uid), Closing::of(fd, self.uid));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_user_whose_descriptors_do_not_close_sends_no_more() {
        let (uid, other) = (54_321, 54_322);
        let file = || tempfile::tempfile().unwrap();
        let stuck: Vec<Closing> = (0..CLOSING_MAX).map(|_| Closing::of(file(), uid)).collect();
        assert!(!ReceivedFd::may_come_from(uid) && ReceivedFd::may_come_from(other));
        drop(stuck);
        assert!(ReceivedFd::may_come_from(uid));
        drop((0..10 * CLOSING_MAX).map(|_| ReceivedFd::of(file().into(), uid)).collect::<Vec<_>>());
        let begun = Instant::now();
        while CLOSING.lock().contains_key(&uid) {
            assert!(begun.elapsed() < Duration::from_secs(20), "local files close");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
