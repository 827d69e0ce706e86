//! The rendering process, from its first instruction to its exit code.

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use rustix::process::{Resource, Rlimit, Signal};

use super::environment::{Failure, find, render};
use super::{CPU_SECONDS_MAX, MEMORY_MIB_MAX, REQUEST_BYTES_MAX, SUBCOMMAND, Task, TemplateRequest};

/// Exit codes. With 0, standard output holds the text; with the others, the reason why there is none.
pub(super) mod exit {
    pub const SYNTAX: u8 = 65;
    pub const REFUSED: u8 = 66;
    pub const FAILED: u8 = 67;
    pub const OUT_OF_STEPS: u8 = 68;
    pub const OUTPUT_TOO_LONG: u8 = 69;
    pub const REQUEST: u8 = 70;
    pub const CONFINEMENT: u8 = 71;
}

/// Longest message about a failure, in bytes.
pub(super) const MESSAGE_BYTES_MAX: usize = 1 << 10;

/// Stack in bytes. The template's deepest nesting depends on it, and so must not be the caller's limit.
const STACK_BYTES: u64 = 8 << 20;

/// Does the task on standard input. For the subcommand [`super::SUBCOMMAND`] only. Must be the first thing in the
/// process: it permanently limits memory, files and time.
pub fn child_main() -> ExitCode {
    let memory = (Resource::As, MEMORY_MIB_MAX << 20);
    let (code, text) = match bound_stack().and_then(|()| Ok(confine(CPU_SECONDS_MAX, memory)?)) {
        Ok(()) => answer(),
        Err(error) => (exit::CONFINEMENT, format!("the process could not be confined: {error}")),
    };
    let written = io::stdout().lock().write_all(text.as_bytes());
    ExitCode::from(if written.is_ok() { code } else { exit::REQUEST })
}

/// Starts this program again where the stack's limit is another: a lower one holds for new programs only. Without a
/// limit, a stack that overflows meets no guard page, and nobody learns why the process died.
fn bound_stack() -> io::Result<()> {
    let limit = rustix::process::getrlimit(Resource::Stack);
    let most = limit.maximum.map_or(STACK_BYTES, |most| most.min(STACK_BYTES));
    if limit.current == Some(most) {
        return Ok(());
    }
    rustix::process::setrlimit(Resource::Stack, Rlimit { current: Some(most), ..limit })?;
    Err(Command::new("/proc/self/exe").arg(SUBCOMMAND).exec())
}

/// Limits the process to some memory, a little time and the three open pipes.
pub(in crate::model) fn confine(cpu_seconds: u64, memory: (Resource, u64)) -> rustix::io::Result<()> {
    let limit = |resource, most: u64| {
        rustix::process::setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })
    };
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?;
    rustix::thread::set_no_new_privs(true)?;
    limit(Resource::Core, 0)?;
    limit(Resource::Fsize, 0)?;
    limit(Resource::Nofile, 0)?;
    limit(Resource::Nproc, 0)?;
    limit(Resource::Cpu, cpu_seconds)?;
    limit(memory.0, memory.1)
}

fn answer() -> (u8, String) {
    let mut request = Vec::new();
    // One byte above the limit, to detect a request that is too long.
    let read = io::stdin().lock().take(REQUEST_BYTES_MAX as u64 + 1).read_to_end(&mut request);
    let task = match read {
        Ok(bytes) if bytes > REQUEST_BYTES_MAX => {
            return (exit::REQUEST, "the request is too long".to_owned());
        }
        Ok(_) => serde_json::from_slice::<Task<TemplateRequest, String>>(&request)
            .map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    let done = match task {
        Ok(Task::Render(request)) => render(&request),
        Ok(Task::Find { template, variables }) => find(&template, &variables).map(Option::unwrap_or_default),
        Err(message) => return (exit::REQUEST, message),
    };
    let failure = match done {
        Ok(text) => return (0, text),
        Err(failure) => failure,
    };
    let (code, mut message) = match failure {
        Failure::Syntax(message) => (exit::SYNTAX, message),
        Failure::Refused(message) => (exit::REFUSED, message),
        Failure::Failed(message) => (exit::FAILED, message),
        Failure::OutOfSteps => (exit::OUT_OF_STEPS, String::new()),
        Failure::OutputTooLong => (exit::OUTPUT_TOO_LONG, String::new()),
    };
    while message.len() > MESSAGE_BYTES_MAX {
        message.pop();
    }
    (code, message)
}
