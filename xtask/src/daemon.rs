//! Starts a `rocmforged` on a private socket, and the client that talks to it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::error::{Error, Result};
use crate::host::{self, Programs};

/// Most time from the daemon's start to its first answer.
const READY_MAX: Duration = Duration::from_secs(30);

/// Most time to end after SIGTERM: the daemon's own limit for running answers, and a margin.
const STOP_MAX: Duration = Duration::from_secs(15);

/// A running daemon. Dropping it stops the daemon and removes its directory.
pub struct Daemon {
    child: Child,
    dir: TempDir,
    client: PathBuf,
    /// Set once the process was seen to have ended.
    ended: bool,
    /// Time from its start to its first answer.
    pub ready_after: Duration,
}

/// Builds the release binaries that are out of date; returns their directory.
pub fn build() -> Result<PathBuf> {
    Programs::Release.build()
}

/// As [`build`], without the programs that the demo does not run.
pub fn build_for_demo() -> Result<PathBuf> {
    let programs = ["--bin", "rocmforged", "--bin", "rocmforge-client"];
    host::run(host::cargo().args(["build", "--release"]).args(programs))?;
    Ok(host::target_dir().join("release"))
}

impl Daemon {
    /// Starts the daemon in `binaries` on the models in `models`, with `config` (TOML) as its configuration, and
    /// waits for its first answer.
    ///
    /// # Errors
    /// [`Error::DaemonEnded`] and [`Error::DaemonSilent`], both with its log; [`Error::Interrupted`].
    pub fn start(binaries: &Path, models: &Path, config: &str) -> Result<Self> {
        Self::start_with(binaries, &[models], config, &[])
    }

    /// As [`Daemon::start`], with several directories and extra environment variables.
    ///
    /// # Errors
    /// As [`Daemon::start`].
    pub fn start_with(
        binaries: &Path,
        models: &[&Path],
        config: &str,
        environment: &[(&str, &OsStr)],
    ) -> Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("rocmforge-")
            .tempdir()
            .map_err(Error::io("temporary directory"))?;
        let config_path = dir.path().join("config.toml");
        fs::write(&config_path, config).map_err(Error::at(&config_path))?;
        let log_path = dir.path().join("log");
        let log = File::create(&log_path).map_err(Error::at(&log_path))?;
        let program = binaries.join("rocmforged");
        let mut command = Command::new(&program);
        command.arg("--socket").arg(dir.path().join("api.sock"));
        for dir in models {
            command.arg("--models").arg(dir);
        }
        command.arg("--config").arg(config_path);
        command.envs(environment.iter().copied());
        // Its own process group: Ctrl-C on the terminal reaches this program and the client, and this program stops
        // the daemon in order.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let started = Instant::now();
        let child = command.spawn().map_err(Error::at(&program))?;
        let client = binaries.join("rocmforge-client");
        let mut daemon = Self { child, dir, client, ended: false, ready_after: Duration::ZERO };
        daemon.wait_ready(started)?;
        Ok(daemon)
    }

    fn wait_ready(&mut self, started: Instant) -> Result<()> {
        loop {
            if let Some(status) = self.child.try_wait().map_err(Error::io("wait"))? {
                self.ended = true;
                return Err(Error::DaemonEnded { status, log: self.log() });
            }
            host::check_interrupted()?;
            if self.socket().exists() && host::works(self.client().arg("ping")) {
                self.ready_after = started.elapsed();
                return Ok(());
            }
            if started.elapsed() > READY_MAX {
                return Err(Error::DaemonSilent { seconds: READY_MAX.as_secs(), log: self.log() });
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Path of its socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("api.sock")
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Path of the client program.
    pub fn client_program(&self) -> &Path {
        &self.client
    }

    /// The daemon's log so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// A command for the client with the daemon's socket; the caller adds arguments.
    pub fn client(&self) -> Command {
        let mut command = Command::new(&self.client);
        command.arg("--socket").arg(self.socket());
        command
    }

    /// Runs a client command with `--json` and returns the object it prints.
    ///
    /// # Errors
    /// [`Error::Command`], [`Error::Unexpected`], [`Error::Interrupted`].
    pub fn ask(&self, arguments: &[&str]) -> Result<Value> {
        let text = host::read(self.client().args(arguments).arg("--json").stdin(Stdio::null()))?;
        serde_json::from_str(&text).map_err(|_| Error::Unexpected { what: "the client", text })
    }

    /// Stops the daemon with SIGTERM and waits for its end; kills it after the time limit.
    ///
    /// # Errors
    /// [`Error::DaemonEnded`] if it ends without success.
    pub fn stop(mut self) -> Result<()> {
        match self.end() {
            Some(status) if !status.success() => Err(Error::DaemonEnded { status, log: self.log() }),
            _ => Ok(()),
        }
    }

    /// Returns `None` if the daemon had already ended; then prints its log.
    fn end(&mut self) -> Option<ExitStatus> {
        match self.child.try_wait() {
            Ok(None) => {}
            Err(_) => return None,
            Ok(Some(status)) => {
                if !std::mem::replace(&mut self.ended, true) {
                    eprintln!("the daemon ended on its own with {status}; its log:\n{}", self.log());
                }
                return None;
            }
        }
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id().cast_signed()) {
            // The process may have ended already; the wait below sees that.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let asked = Instant::now();
        while asked.elapsed() < STOP_MAX {
            if let Ok(Some(status)) = self.child.try_wait() {
                self.ended = true;
                return Some(status);
            }
            thread::sleep(Duration::from_millis(20));
        }
        eprintln!("the daemon did not end within {} s after SIGTERM; killing it", STOP_MAX.as_secs());
        // SIGKILL is the last resort.
        let _ = self.child.kill();
        self.ended = true;
        self.child.wait().ok()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.end();
    }
}
