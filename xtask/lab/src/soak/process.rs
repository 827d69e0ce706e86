//! Reads the kernel's counts for the daemon's process.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use xtask::error::{Error, Result};

use super::judge::Sample;

/// Runtime threads of the daemon; further threads of the same name are for blocking work.
const RUNTIME_THREADS: usize = 2;

pub struct Process(PathBuf);

impl Process {
    pub fn of(pid: u32) -> Self {
        Self(PathBuf::from(format!("/proc/{pid}")))
    }

    pub fn sample(&self, at: Duration) -> Result<Sample> {
        let status = fs::read_to_string(self.0.join("status")).map_err(Error::at(&self.0))?;
        let number = |key: &str| -> Result<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            let word =
                line.and_then(|line| line.split_whitespace().next()).and_then(|word| word.parse().ok());
            word.ok_or_else(|| Error::Unexpected { what: "/proc", text: status.clone() })
        };
        let fds = fs::read_dir(self.0.join("fd")).map_err(Error::at(&self.0))?.count();
        Ok(Sample { at, anon_kib: number("RssAnon:")?, threads: number("Threads:")?, fds: fds as u64 })
    }

    /// Whether there are threads for blocking work, which end after a while without work.
    pub fn has_blocking_threads(&self) -> Result<bool> {
        let tasks = fs::read_dir(self.0.join("task")).map_err(Error::at(&self.0))?;
        let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
        Ok(names.filter(|name| name.trim() == "io").count() > RUNTIME_THREADS)
    }
}
