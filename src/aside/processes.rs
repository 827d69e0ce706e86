//! Starts programs that inherit no descriptor of a client.
//!
//! A new process begins with a copy of its starter's descriptors, and closes those that the program must not have. To close a
//! file of FUSE asks its server. So with one descriptor of a server that never answers, no program would ever start. One
//! thread with a table of descriptors of its own therefore starts them all: what clients send never is in its table.

#![allow(unsafe_code)]

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::LazyLock;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use rustix::fs::{Dir, Mode, OFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::thread::UnshareFlags;

use crate::lock::{Mutex, Rank};

/// A program starts within milliseconds; one on a file system that does not answer never does.
const PATIENCE: Duration = Duration::from_secs(10);

/// Standard input, output and error.
const PIPES: usize = 3;

/// A program to start with the three pipes that are sent for it.
struct Order {
    program: Command,
    reply: SyncSender<io::Result<Child>>,
}

/// The way to the thread that starts programs.
struct Starter {
    orders: SyncSender<Order>,
    socket: OwnedFd,
}

static STARTER: LazyLock<io::Result<Mutex<Starter>>> =
    LazyLock::new(|| Starter::begin().map(|starter| Mutex::new(Rank::Starter, starter)));

/// Makes the thread that starts programs. Call it before the first client comes: later it may meet a descriptor that does not
/// close.
///
/// # Errors
/// Those of the thread and its socket; then no program starts.
pub fn prepare() -> io::Result<()> {
    starter().map(|_| ())
}

/// Starts a program with pipes for its standard input, output and error, in the child's fields. Blocks for some
/// milliseconds, and for at most 10 s.
///
/// # Errors
/// As `Command::spawn`; [`io::ErrorKind::TimedOut`] when an earlier program's file did not answer.
pub fn start(program: Command) -> io::Result<Child> {
    let (stdin, to_stdin) = io::pipe()?;
    let (from_stdout, stdout) = io::pipe()?;
    let (from_stderr, stderr) = io::pipe()?;
    let (reply, answer) = sync_channel(1);
    {
        // Both under one lock: the thread takes an order and its pipes together.
        let starter = starter()?.lock();
        send(&starter.socket, [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()])?;
        starter.orders.send(Order { program, reply }).map_err(|_| gone())?;
    }
    drop((stdin, stdout, stderr));
    let mut child = answer.recv_timeout(PATIENCE).map_err(|_| {
        io::Error::new(io::ErrorKind::TimedOut, format!("no program started within {} s", PATIENCE.as_secs()))
    })??;
    child.stdin = Some(ChildStdin::from(OwnedFd::from(to_stdin)));
    child.stdout = Some(ChildStdout::from(OwnedFd::from(from_stdout)));
    child.stderr = Some(ChildStderr::from(OwnedFd::from(from_stderr)));
    Ok(child)
}

fn starter() -> io::Result<&'static Mutex<Starter>> {
    STARTER.as_ref().map_err(|error| io::Error::new(error.kind(), error.to_string()))
}

fn gone() -> io::Error {
    io::Error::other("the thread that starts programs has ended: a bug in the daemon")
}

impl Starter {
    fn begin() -> io::Result<Self> {
        let kind = (AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC);
        let (socket, theirs) = socketpair(kind.0, kind.1, kind.2, None)?;
        let (orders, taken) = sync_channel(0);
        let (ready, began) = sync_channel(1);
        let number = theirs.as_raw_fd();
        std::thread::Builder::new().name("starts programs".to_owned()).spawn(move || {
            match own_table(number) {
                Ok(socket) => {
                    let _ = ready.send(Ok(()));
                    serve(&taken, &socket);
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
        })?;
        // The thread has its own copy once it has begun.
        began.recv().map_err(|_| gone())??;
        drop(theirs);
        Ok(Self { orders, socket })
    }
}

/// Gives this thread a table of descriptors of its own, with only the standard ones and number `socket`.
fn own_table(socket: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the thread has just begun and holds no descriptor by a type; from here on, numbers mean its own copies.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FILES) }?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut listing = Dir::new(rustix::fs::open("/proc/thread-self/fd", flags, Mode::empty())?)?;
    let own = [socket, listing.fd()?.as_raw_fd()];
    let mut copies = Vec::new();
    while let Some(entry) = listing.read() {
        // Two of the names are no numbers.
        let number = entry?.file_name().to_str().ok().and_then(|name| name.parse::<RawFd>().ok());
        copies.extend(number.filter(|number| *number > 2 && !own.contains(number)));
    }
    for number in copies {
        // SAFETY: an open copy that nothing else in this table refers to; no other thread uses this table.
        unsafe { rustix::io::close(number) };
    }
    // SAFETY: the copy is this thread's alone.
    Ok(unsafe { OwnedFd::from_raw_fd(socket) })
}

fn serve(orders: &Receiver<Order>, socket: &OwnedFd) {
    for Order { mut program, reply } in orders {
        let started = receive(socket).and_then(|[stdin, stdout, stderr]| {
            program.stdin(Stdio::from(stdin)).stdout(Stdio::from(stdout)).stderr(Stdio::from(stderr)).spawn()
        });
        // The pipes' ends in this table would keep them open.
        drop(program);
        let _ = reply.send(started);
    }
}

fn send(socket: &OwnedFd, pipes: [std::os::fd::BorrowedFd<'_>; PIPES]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PIPES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&pipes));
    sendmsg(socket, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn receive(socket: &OwnedFd) -> io::Result<[OwnedFd; PIPES]> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PIPES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(socket, &mut [IoSliceMut::new(&mut [0])], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    let pipes: Vec<OwnedFd> = rights.flatten().collect();
    pipes.try_into().map_err(|_| io::Error::other("the pipes of a program were lost on their way"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(program: impl FnOnce(Command) -> io::Result<Child>) -> Vec<String> {
        let mut command = Command::new("ls");
        command.arg("/proc/self/fd").env_clear().env("PATH", "/usr/bin:/bin");
        let output = program(command).unwrap().wait_with_output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_program_inherits_nothing_that_came_later() {
        prepare().unwrap();
        let file = tempfile::tempfile().unwrap();
        // Without this flag a process keeps the descriptor, so that it shows.
        rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
        let number = file.as_raw_fd().to_string();
        let plain = listed(|mut command| command.stdout(Stdio::piped()).spawn());
        assert!(plain.contains(&number), "{plain:?}");
        // Standard input, output, error, and the folder that is listed.
        assert_eq!(listed(start), ["0", "1", "2", "3"]);
        // The pipes end when the program does.
        let mut cat = start(Command::new("cat")).unwrap();
        drop(cat.stdin.take());
        assert!(cat.wait_with_output().unwrap().stdout.is_empty());
    }

    #[test]
    fn a_program_that_is_missing_is_an_error_and_others_start() {
        let error = start(Command::new("/nowhere/program")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert_eq!(listed(start).len(), 4);
    }
}
