//! A test's daemon: its process, socket, model directory and log.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rocmforge_client::wire::{GenerateRequest, Prompt, StatusReply};
use rocmforge_client::{Client, ClientError, Generation, Options};
use rustix::process::{Pid, Signal, kill_process};

use crate::common;

/// Upper limit of every wait; a test that waits longer has failed.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Name of the kept model in a [`Rig`].
pub const TINY: &str = "tiny";

pub struct Rig {
    pub dir: tempfile::TempDir,
    child: Option<Child>,
}

impl Rig {
    /// A directory with the kept model, without a daemon.
    pub fn idle() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("models")).unwrap();
        let rig = Self { dir, child: None };
        std::fs::copy(common::tinystories(), rig.model(TINY)).unwrap();
        rig
    }

    /// A daemon that serves the kept model.
    pub fn start() -> Self {
        Self::start_with("")
    }

    /// Like [`Rig::start`], with a configuration file of this text.
    pub fn start_with(config: &str) -> Self {
        let mut rig = Self::idle();
        rig.configure(config);
        rig.run();
        rig
    }

    /// A daemon that serves the kept model, with a limit of 48 descriptors.
    pub fn start_with_few_descriptors() -> Self {
        Self::start_with_descriptors(48)
    }

    /// A daemon that serves the kept model, with this limit of descriptors.
    pub fn start_with_descriptors(limit: u32) -> Self {
        let mut rig = Self::idle();
        let mut command = rig.command_with_descriptors(limit);
        rig.spawn(&mut command);
        rig.assert_serves();
        rig
    }

    /// As [`Rig::command`], with this limit of descriptors.
    pub fn command_with_descriptors(&self, limit: u32) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &format!("ulimit -n {limit}; exec \"$@\""), "sh"]);
        let daemon = self.command();
        command.arg(daemon.get_program()).args(daemon.get_args());
        command
    }

    /// Connections that use up such a daemon's descriptors until they drop.
    pub fn take_all_descriptors(&self) -> Vec<UnixStream> {
        // The kernel completes these connections; the daemon has too few descriptors to accept them all.
        let held = (0..64).map(|_| UnixStream::connect(self.socket()).unwrap()).collect();
        let until = Instant::now() + PATIENCE;
        while !self.log_text().contains("cannot be accepted") {
            assert!(Instant::now() < until, "the log never reported the failed accept");
            std::thread::sleep(Duration::from_millis(10));
        }
        held
    }

    pub fn configure(&self, config: &str) {
        std::fs::write(self.config(), config).unwrap();
    }

    /// Has the daemon reload a configuration file of this text.
    pub fn reload(&self, config: &str) {
        let told = || self.log_text().matches("configuration read again").count();
        let before = told();
        self.configure(config);
        self.signal(Signal::HUP);
        let until = Instant::now() + PATIENCE;
        while told() == before {
            assert!(Instant::now() < until, "the configuration was not reloaded: {}", self.log_text());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Starts the daemon and waits until it answers.
    pub fn run(&mut self) {
        self.spawn(&mut self.command());
        self.client().ping(b"").expect("the daemon does not answer");
    }

    /// The daemon's command line, for tests that change it.
    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rocmforged"));
        command.arg("--socket").arg(self.socket()).arg("--models").arg(self.dir.path().join("models"));
        if self.config().exists() {
            command.arg("--config").arg(self.config());
        }
        // A test must not depend on other programs' use of memory.
        command.env("MEMORY_PRESSURE_WATCH", "/dev/null");
        command.env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDS").env_remove("WATCHDOG_USEC");
        command
    }

    pub fn spawn(&mut self, command: &mut Command) {
        let log = File::options().create(true).append(true).open(self.log()).unwrap();
        self.child = Some(command.stderr(log).stdout(Stdio::null()).spawn().unwrap());
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("api.sock")
    }

    /// Path of the model `name`.
    pub fn model(&self, name: &str) -> PathBuf {
        self.dir.path().join("models").join(format!("{name}.gguf"))
    }

    pub fn config(&self) -> PathBuf {
        self.dir.path().join("config.toml")
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    pub fn log_text(&self) -> String {
        std::fs::read_to_string(self.log()).unwrap_or_default()
    }

    pub fn options(&self) -> Options {
        Options {
            socket: self.socket(),
            connect_timeout: PATIENCE,
            absent_timeout: PATIENCE,
            ..Options::default()
        }
    }

    /// A client with its own connection.
    pub fn client(&self) -> Client {
        Client::new(self.options())
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("the daemon is not started").id()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.pid() as i32).unwrap(), signal).unwrap();
    }

    /// Waits for the daemon's end.
    pub fn ended(&mut self) -> ExitStatus {
        let mut child = self.child.take().expect("the daemon is not started");
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < until, "the daemon did not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| child.try_wait().unwrap().is_none())
    }

    /// Number of open descriptors of the daemon.
    pub fn descriptors(&self) -> usize {
        self.open_files().count()
    }

    fn open_files(&self) -> impl Iterator<Item = PathBuf> {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap().map(|entry| entry.unwrap().path())
    }

    /// Waits until the daemon has at most this many descriptors open: it closes abandoned connections a moment later.
    #[track_caller]
    pub fn assert_descriptors(&self, most: usize) {
        let until = Instant::now() + PATIENCE;
        while self.descriptors() > most {
            if Instant::now() >= until {
                let open: Vec<_> = self.open_files().filter_map(|path| path.read_link().ok()).collect();
                panic!("{} descriptors are open, limit {most}: {open:?}", open.len());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Checks that a good request succeeds, whatever happened before.
    #[track_caller]
    pub fn assert_serves(&mut self) {
        assert!(self.is_running(), "the daemon died:\n{}", self.log_text());
        let answer = answer(&self.client(), &story(8)).unwrap();
        assert_eq!(answer.text, ", there was a little girl", "the daemon's answer changed");
    }

    /// Waits until the daemon's status is as wanted. `what` names the wanted condition.
    #[track_caller]
    pub fn eventually(&self, what: &str, wanted: impl Fn(&StatusReply) -> bool) -> StatusReply {
        let client = self.client();
        let until = Instant::now() + PATIENCE;
        loop {
            let status = client.status().unwrap();
            if wanted(&status) {
                return status;
            }
            assert!(Instant::now() < until, "timed out waiting until {what}; {status:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until nothing runs, all pages are free or cached, and no user's request counts against its limit. The
    /// engine's part of a request ends before the session's.
    #[track_caller]
    pub fn assert_idle(&self) {
        let client = self.client();
        self.eventually("the daemon is idle and no request has a page or counts", |status| {
            let device = &status.devices[0];
            (device.sequences_running, device.sequences_queued, device.kv_pages_used, device.kv_bytes)
                == (0, 0, 0, device.kv_cached_bytes())
                && client.users().unwrap().users.iter().all(|user| user.sequences == 0)
        });
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            eprintln!("log of the daemon:\n{}", self.log_text());
        }
    }
}

/// A complete answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub ids: Vec<u32>,
    pub text: String,
    pub prompt_ids: Vec<u32>,
}

/// A story of exactly this many tokens.
pub fn story(max_tokens: u32) -> GenerateRequest {
    let prompt = Prompt::Text("Once upon a time".to_owned());
    GenerateRequest { max_tokens, ignore_eog: true, ..GenerateRequest::new(TINY, prompt) }
}

pub fn answer(client: &Client, request: &GenerateRequest) -> Result<Answer, ClientError> {
    collect(&mut client.generate(request)?)
}

/// Reads the rest of an answer.
pub fn collect(generation: &mut Generation) -> Result<Answer, ClientError> {
    let mut answer = Answer { ids: Vec::new(), text: String::new(), prompt_ids: Vec::new() };
    while let Some(item) = generation.next_item()? {
        answer.ids.extend(item.ids);
        answer.text.push_str(&item.text);
        answer.prompt_ids.extend(item.prompt_ids);
    }
    answer.text.push_str(&generation.end().expect("an answer without error has no end").text);
    Ok(answer)
}

/// The daemon's error code.
#[track_caller]
pub fn code<T: std::fmt::Debug>(result: Result<T, ClientError>) -> u16 {
    let error = result.expect_err("the request succeeded");
    error.code().unwrap_or_else(|| panic!("the error is not the daemon's: {error}"))
}

/// The daemon's error.
#[track_caller]
pub fn refusal<T: std::fmt::Debug>(result: Result<T, ClientError>) -> rocmforge_client::wire::WireError {
    match result {
        Err(ClientError::Server(error)) => error,
        other => panic!("not an error from the daemon: {other:?}"),
    }
}

/// The daemon's resident anonymous memory, in bytes.
pub fn anonymous(rig: &Rig) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", rig.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

/// The entries of /proc/PID/smaps for that file; empty if the process has no mapping of it.
pub fn maps(pid: u32, path: &Path) -> String {
    let path = path.to_str().unwrap();
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let mut inside = false;
    let mut found = String::new();
    for line in smaps.lines() {
        if line.split_whitespace().next().is_some_and(|first| first.contains('-')) {
            inside = line.ends_with(path);
        }
        if inside {
            found.push_str(line);
            found.push('\n');
        }
    }
    found
}
