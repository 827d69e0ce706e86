//! Scans of the model directories, each directory on a thread that may be lost.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::directory::{Found, Looks};
use super::tables::Gone;
use super::{Guard, Store, walk};
use crate::aside::Subject;

/// Scans of the directories.
#[derive(Default)]
pub(super) struct Scan {
    started: u64,
    finished: u64,
    /// True while a caller waits for the directories of a scan.
    running: bool,
    looks: Looks,
}

impl Store {
    /// Scans the directories. Callers that arrive during a scan share the next one: any number of misses costs two
    /// scans. Waits at most 2 s ([`Limits::wait`](crate::aside::Limits::wait)): then the names known before stay, and a
    /// directory that hangs is not scanned again before it answers.
    pub fn rescan(self: &Arc<Self>) {
        let until = Instant::now() + self.aside.limits().wait;
        let mut scan = self.scan.lock();
        let wanted = scan.started + 1;
        while scan.running && scan.finished < wanted {
            if self.scanned.wait_until(&mut scan, until) {
                return;
            }
        }
        if scan.finished >= wanted {
            return;
        }
        (scan.started, scan.running) = (wanted, true);
        let directories = self.tables.lock().directories.clone();
        let free = scan.looks.begin(&directories);
        drop(scan);
        for directory in free {
            self.read_aside(&directory);
        }
        let mut scan = self.scan.lock();
        while scan.looks.is_busy() && !self.scanned.wait_until(&mut scan, until) {}
        scan.looks.give_up();
        (scan.finished, scan.running) = (wanted, false);
        let gone = self.merge(scan);
        self.scanned.notify_all();
        self.tell(gone);
    }

    fn read_aside(self: &Arc<Self>, directory: &Path) {
        let name = format!("directory {}", directory.display());
        let subject = Subject { what: "reading a model directory", name, device: None };
        let (store, path) = (Arc::clone(self), directory.to_path_buf());
        let read = self.aside.send(subject, move |errand| {
            let alive = |device| errand.goes_on_at(device);
            let found = catch_unwind(AssertUnwindSafe(|| walk::read(&path, &alive)));
            store
                .was_read(&path, found.unwrap_or_else(|_| Err(std::io::Error::other("a bug in the daemon"))));
        });
        if let Err(error) = read {
            self.was_read(directory, Err(std::io::Error::other(error.to_string())));
        }
    }

    /// Takes the result of reading a directory. A late one is used at once: nobody else does.
    fn was_read(&self, directory: &Path, found: Found) {
        let mut scan = self.scan.lock();
        let late = scan.looks.read(directory, found) && !scan.running;
        let gone = if late { self.merge(scan) } else { Gone::new() };
        self.scanned.notify_all();
        self.tell(gone);
    }

    /// Puts what the scans found into the tables.
    fn merge(&self, mut scan: Guard<'_, Scan>) -> Gone {
        let mut tables = self.tables.lock();
        let directories = tables.directories.clone();
        let entries = scan.looks.all(&directories);
        tables.replace_entries(entries)
    }
}
