//! Starts programs that inherit no descriptor of a client.
//!
//! A new process begins with a copy of its starter's descriptors, and closes those that the program must not have. To close a
//! file of FUSE asks its server. So with one descriptor of a server that never answers, no program would ever start. One
//! thread with a table of descriptors of its own therefore starts them all: what clients send never is in its table.
//!
//! A signal's handler writes to a descriptor by its number, which that thread does not have: a SIGTERM that came to it was lost. So
//! the thread takes no signals, and each program that it starts takes them again with [`take_signals`].

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, LazyLock};
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

/// Most programs that wait for an earlier one to start.
const WAITING_MAX: usize = 16;

/// Standard input, output and error.
const PIPES: usize = 3;

/// A program to start with the three pipes that are sent for it.
struct Order {
    program: Command,
    reply: SyncSender<io::Result<Child>>,
}

/// Orders in the order of their pipes.
type Orders = Arc<Mutex<VecDeque<Order>>>;

/// The way to the thread that starts programs.
struct Starter {
    orders: Orders,
    socket: OwnedFd,
}

static STARTER: LazyLock<io::Result<Starter>> = LazyLock::new(Starter::begin);

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
/// As `Command::spawn`; [`io::ErrorKind::TimedOut`] when the file of this program or of an earlier one does not answer.
pub fn start(program: Command) -> io::Result<Child> {
    starter()?.start(program, PATIENCE)
}

/// Takes signals again: for programs that [`start`] starts, at their beginning.
///
/// # Errors
/// None that a valid set has.
pub fn take_signals() -> io::Result<()> {
    mask(libc::SIG_UNBLOCK)
}

/// Blocks all signals for this thread, or unblocks them.
fn mask(how: libc::c_int) -> io::Result<()> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset(3) makes a whole set where it is told to, and pthread_sigmask(3) reads it. Nothing is returned.
    let status = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(how, all.as_ptr(), std::ptr::null_mut())
    };
    if status == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(status)) }
}

fn starter() -> io::Result<&'static Starter> {
    STARTER.as_ref().map_err(|error| io::Error::new(error.kind(), error.to_string()))
}

fn too_late(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, why)
}

impl Starter {
    fn begin() -> io::Result<Self> {
        let (socket, theirs) = sockets()?;
        let orders = Orders::new(Mutex::new(Rank::Starter, VecDeque::new()));
        let (ready, began) = sync_channel(1);
        let (number, taken) = (theirs.as_raw_fd(), Arc::clone(&orders));
        std::thread::Builder::new().name("starts programs".to_owned()).spawn(move || {
            let own = own_table(number);
            let _ = ready.send(own.as_ref().map(|_| ()).map_err(|error| io::Error::from(error.kind())));
            if let Ok(socket) = own {
                serve(&taken, &socket);
            }
        })?;
        // The thread has its own copy once it has begun.
        began.recv().map_err(io::Error::other)??;
        drop(theirs);
        Ok(Self { orders, socket })
    }

    fn start(&self, program: Command, patience: Duration) -> io::Result<Child> {
        let (stdin, to_stdin) = io::pipe()?;
        let (from_stdout, stdout) = io::pipe()?;
        let (from_stderr, stderr) = io::pipe()?;
        let (reply, answer) = sync_channel(1);
        {
            // Under one lock, so that the thread finds the order that belongs to the pipes.
            let mut orders = self.orders.lock();
            if orders.len() >= WAITING_MAX {
                return Err(too_late(format!("{WAITING_MAX} programs wait for an earlier one to start")));
            }
            send(&self.socket, [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()])?;
            orders.push_back(Order { program, reply });
        }
        drop((stdin, stdout, stderr));
        let waited = |_| too_late(format!("no program started within {} s", patience.as_secs()));
        let mut child = answer.recv_timeout(patience).map_err(waited)??;
        child.stdin = Some(ChildStdin::from(OwnedFd::from(to_stdin)));
        child.stdout = Some(ChildStdout::from(OwnedFd::from(from_stdout)));
        child.stderr = Some(ChildStderr::from(OwnedFd::from(from_stderr)));
        Ok(child)
    }
}

fn sockets() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

/// Gives this thread a table of descriptors of its own, with only the standard ones and number `socket`.
fn own_table(socket: RawFd) -> io::Result<OwnedFd> {
    mask(libc::SIG_BLOCK)?;
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

fn serve(orders: &Orders, socket: &OwnedFd) {
    loop {
        let pipes = receive(socket);
        // One was sent with the pipes.
        let Some(Order { mut program, reply }) = orders.lock().pop_front() else { return };
        let started = pipes.and_then(|[stdin, stdout, stderr]| {
            program.stdin(Stdio::from(stdin)).stdout(Stdio::from(stdout)).stderr(Stdio::from(stderr)).spawn()
        });
        // The pipes' ends in this table would keep them open.
        drop(program);
        if let Err(unsent) = reply.send(started)
            && let Ok(mut child) = unsent.0
        {
            // Its caller waits no longer.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn send(socket: &OwnedFd, pipes: [BorrowedFd<'_>; PIPES]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PIPES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&pipes));
    sendmsg(socket, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
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
    fn the_thread_that_starts_programs_takes_no_signal() {
        prepare().unwrap();
        let blocked = |folder: &std::path::Path| {
            let status = std::fs::read_to_string(folder.join("status")).unwrap();
            let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap().trim();
            u64::from_str_radix(mask, 16).unwrap()
        };
        let of = |signal: libc::c_int| 1u64 << (signal - 1);
        let threads = std::fs::read_dir("/proc/self/task").unwrap().map(|thread| thread.unwrap().path());
        let starters: Vec<u64> = threads
            .filter(|thread| {
                std::fs::read(thread.join("comm")).is_ok_and(|name| name == b"starts programs\n")
            })
            .map(|thread| blocked(&thread))
            .collect();
        let [set] = starters.as_slice() else { panic!("{starters:?}") };
        assert_eq!(set & of(libc::SIGTERM), of(libc::SIGTERM));
        assert_eq!(set & of(libc::SIGHUP), of(libc::SIGHUP));
        let taken = std::thread::spawn(move || {
            mask(libc::SIG_BLOCK).unwrap();
            take_signals().unwrap();
            blocked(std::path::Path::new("/proc/thread-self"))
        });
        assert_eq!(taken.join().unwrap(), 0);
    }

    #[test]
    fn programs_wait_for_one_that_does_not_start_but_not_for_ever() {
        let (socket, _theirs) = sockets().unwrap();
        // Nobody serves it.
        let stuck = Starter { orders: Orders::new(Mutex::new(Rank::Starter, VecDeque::new())), socket };
        let ask = || stuck.start(Command::new("true"), Duration::from_millis(1)).unwrap_err();
        for _ in 0..WAITING_MAX {
            assert!(ask().to_string().starts_with("no program started"));
        }
        let refused = ask();
        assert_eq!(refused.kind(), io::ErrorKind::TimedOut);
        assert!(refused.to_string().contains("16 programs wait"), "{refused}");
    }

    #[test]
    fn a_program_that_is_missing_is_an_error_and_others_start() {
        let error = start(Command::new("/nowhere/program")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert_eq!(listed(start).len(), 4);
    }
}
