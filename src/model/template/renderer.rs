//! The daemon's side: starts the rendering process, exchanges data with it, and ends it in time.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::aside::processes;

use super::child::{MESSAGE_BYTES_MAX, exit};
use super::{
    CPU_SECONDS_MAX, MEMORY_MIB_MAX, OUTPUT_BYTES_MAX, REQUEST_BYTES_MAX, SOURCE_BYTES_MAX, SUBCOMMAND, Task,
    TemplateError, TemplateRequest,
};

/// Bytes kept of the process's standard error.
const STDERR_BYTES_MAX: usize = 4 << 10;

/// Renders templates in processes of `program`. Threads share it by reference. Each rendering has a process of
/// [`MEMORY_MIB_MAX`], so the caller must bound the number of concurrent renderings.
#[derive(Debug)]
pub struct Renderer {
    program: PathBuf,
    deadline: Duration,
}

impl Renderer {
    /// A renderer that starts `program`, a `rocmforged`; `/proc/self/exe` is the running one, even after its file was
    /// replaced. Each rendering has 5 s from request to text, more than twice its processor time.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        let deadline = Duration::from_secs(5);
        Self { program: program.into(), deadline }
    }

    /// Changes the deadline of each rendering.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Renders a conversation to text. Blocks for about 3 ms, and at most for the deadline: do not call on runtime
    /// threads.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub fn render(&self, request: &TemplateRequest) -> Result<String, TemplateError> {
        self.answer(&request.template, &Task::Render(request))
    }

    /// The first of `variables` that the template reads before it sets it. Blocks as [`render`](Self::render) does.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub fn find(&self, template: &str, variables: &[&str]) -> Result<Option<String>, TemplateError> {
        let task = Task::<&TemplateRequest, &str>::Find { template, variables: variables.to_vec() };
        let found = self.answer(template, &task)?;
        Ok((!found.is_empty()).then_some(found))
    }

    fn answer(&self, template: &str, task: &Task<&TemplateRequest, &str>) -> Result<String, TemplateError> {
        let bytes = template.len();
        if bytes > SOURCE_BYTES_MAX {
            return Err(TemplateError::SourceTooLong { bytes, limit: SOURCE_BYTES_MAX });
        }
        let request = serde_json::to_vec(task)
            .map_err(|error| process_error("given its request", io::Error::other(error)))?;
        if request.len() > REQUEST_BYTES_MAX {
            let limit = REQUEST_BYTES_MAX;
            return Err(TemplateError::RequestTooLong { bytes: request.len(), limit });
        }
        let end = Instant::now() + self.deadline;
        let mut process = Process::start(&self.program, SUBCOMMAND)?;
        let outcome = process.talk(&request, end);
        let status = process.end(outcome.is_ok())?;
        match outcome? {
            Ended::Itself => self.verdict(status, &process.stdout, &process.stderr),
            Ended::OutputTooLong => Err(TemplateError::OutputTooLong { limit: OUTPUT_BYTES_MAX }),
            Ended::Deadline => Err(self.too_slow()),
        }
    }

    fn verdict(&self, status: ExitStatus, stdout: &[u8], stderr: &[u8]) -> Result<String, TemplateError> {
        let text = String::from_utf8_lossy(stdout);
        let message = text.chars().take(MESSAGE_BYTES_MAX).collect();
        let code = match status.code() {
            Some(0) => return Ok(text.into_owned()),
            code => code.and_then(|code| u8::try_from(code).ok()),
        };
        Err(match code {
            Some(exit::SYNTAX) => TemplateError::Syntax { message },
            Some(exit::REFUSED) => TemplateError::Refused { message },
            Some(exit::FAILED) => TemplateError::Failed { message },
            Some(exit::OUT_OF_STEPS) => TemplateError::TooSlow { limit: "its number of steps".to_owned() },
            Some(exit::OUTPUT_TOO_LONG) => TemplateError::OutputTooLong { limit: OUTPUT_BYTES_MAX },
            Some(exit::REQUEST | exit::CONFINEMENT) => {
                TemplateError::Process { action: "made ready", source: io::Error::other(text.into_owned()) }
            }
            _ => self.death(status, stderr),
        })
    }

    /// The error of a process that died without a message.
    fn death(&self, status: ExitStatus, stderr: &[u8]) -> TemplateError {
        const CPU: [Option<i32>; 2] = [Some(Signal::XCPU.as_raw()), Some(Signal::KILL.as_raw())];
        let stderr = String::from_utf8_lossy(stderr);
        // Rust's messages for an exhausted allocator, and for a size above any possible allocation.
        if stderr.contains("memory allocation of") || stderr.contains("capacity overflow") {
            return TemplateError::OutOfMemory { limit_mib: MEMORY_MIB_MAX };
        }
        // Rust's message before it aborts.
        if stderr.contains("has overflowed its stack") {
            return TemplateError::TooDeep;
        }
        if CPU.contains(&status.signal()) {
            return TemplateError::TooSlow { limit: format!("{CPU_SECONDS_MAX} s of processor time") };
        }
        TemplateError::Died { status: status.to_string() }
    }

    fn too_slow(&self) -> TemplateError {
        TemplateError::TooSlow { limit: format!("{} ms", self.deadline.as_millis()) }
    }
}

/// How the exchange with a process ended.
pub(in crate::model) enum Ended {
    /// The process exited.
    Itself,
    OutputTooLong,
    Deadline,
}

/// A confined process. Dropping it kills the process and waits for it.
pub(in crate::model) struct Process {
    child: Child,
    exited: OwnedFd,
    stdout: Vec<u8>,
    pub(in crate::model) stderr: Vec<u8>,
}

impl Process {
    /// Starts `program` with that first argument.
    pub(in crate::model) fn start(program: &Path, subcommand: &str) -> Result<Self, TemplateError> {
        let started = |source| process_error("started", source);
        let mut command = Command::new(program);
        command.arg(subcommand).env_clear().current_dir("/");
        let mut child = processes::start(command).map_err(started)?;
        match rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(exited) => Ok(Self { child, exited, stdout: Vec::new(), stderr: Vec::new() }),
            Err(error) => {
                // Nothing watches this child yet, so kill and reap it here.
                let _ = child.kill();
                let _ = child.wait();
                Err(started(error.into()))
            }
        }
    }

    /// Writes the request and reads both outputs until the process has exited, or until `end`.
    pub(in crate::model) fn talk(&mut self, request: &[u8], end: Instant) -> Result<Ended, TemplateError> {
        let mut stdin = self.child.stdin.take();
        let (mut stdout, mut stderr) = (self.child.stdout.take(), self.child.stderr.take());
        for pipe in [
            stdin.as_ref().map(AsFd::as_fd),
            stdout.as_ref().map(AsFd::as_fd),
            stderr.as_ref().map(AsFd::as_fd),
        ] {
            let Some(pipe) = pipe else { continue };
            rustix::fs::fcntl_setfl(pipe, OFlags::NONBLOCK)
                .map_err(|error| process_error("talked to", error.into()))?;
        }
        let mut rest = request;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Ended::Deadline);
            }
            let exited = self.wait_ready(stdin.as_ref(), &stdout, &stderr, left)?;
            if write_some(&mut stdin, &mut rest).map_err(|error| process_error("written to", error))? {
                stdin = None;
            }
            let read = |error| process_error("read from", error);
            if read_some(&mut stdout, &mut self.stdout, OUTPUT_BYTES_MAX).map_err(read)? {
                return Ok(Ended::OutputTooLong);
            }
            // Output above the limit is read and dropped, so that the process does not wait for the daemon.
            while read_some(&mut stderr, &mut self.stderr, STDERR_BYTES_MAX).map_err(read)? {
                self.stderr.truncate(STDERR_BYTES_MAX);
            }
            // The process exited before the pipes were read, so all its output is here.
            if exited {
                return Ok(Ended::Itself);
            }
        }
    }

    /// Waits until a pipe is ready or the process exits; true when it has exited.
    fn wait_ready<I: AsFd, O: AsFd, E: AsFd>(
        &self,
        stdin: Option<&I>,
        stdout: &Option<O>,
        stderr: &Option<E>,
        left: Duration,
    ) -> Result<bool, TemplateError> {
        let mut fds = Vec::with_capacity(4);
        fds.push(PollFd::new(&self.exited, PollFlags::IN));
        fds.extend(stdin.map(|pipe| PollFd::new(pipe, PollFlags::OUT)));
        fds.extend(stdout.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        fds.extend(stderr.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        let timeout = Timespec::try_from(left).ok();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(!fds[0].revents().is_empty()),
            Err(error) => Err(process_error("waited for", error.into())),
        }
    }

    /// Kills the process unless it has exited, and returns its status.
    pub(in crate::model) fn end(&mut self, talked: bool) -> Result<ExitStatus, TemplateError> {
        let waited = |error| process_error("waited for", error);
        if talked && let Some(status) = self.child.try_wait().map_err(waited)? {
            return Ok(status);
        }
        self.child.kill().map_err(waited)?;
        self.child.wait().map_err(waited)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both calls leave a process alone that was already waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes as much as fits; true when all is written or the reader is gone.
fn write_some(stdin: &mut Option<ChildStdin>, rest: &mut &[u8]) -> io::Result<bool> {
    let Some(pipe) = stdin else { return Ok(false) };
    loop {
        match pipe.write(rest) {
            Ok(bytes) => *rest = &rest[bytes..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(true),
            Err(error) => return Err(error),
        }
        if rest.is_empty() {
            return Ok(true);
        }
    }
}

/// Reads the available bytes and closes the pipe at its end; true when `into` holds more than `limit`.
fn read_some<R: Read>(pipe: &mut Option<R>, into: &mut Vec<u8>, limit: usize) -> io::Result<bool> {
    let mut buffer = [0; 8 << 10];
    while let Some(reader) = pipe {
        match reader.read(&mut buffer) {
            Ok(0) => *pipe = None,
            Ok(bytes) => into.extend_from_slice(&buffer[..bytes]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
        if into.len() > limit {
            return Ok(true);
        }
    }
    Ok(false)
}

fn process_error(action: &'static str, source: io::Error) -> TemplateError {
    TemplateError::Process { action, source }
}
