//! Connecting: socket, hello, check of the server's uid. Repeated until a deadline.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use interprocess::os::unix::uds_local_socket::Stream;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::error::{ClientError, ProtocolError};
use crate::options::Options;
use crate::peer;
use crate::transport::Transport;
use crate::wire::{
    ClientHello, ErrorClass, ErrorCode, FEATURE_CHECKSUM, PAYLOAD_BYTES_MIN, SERVER_HELLO_BYTES, ServerHello,
    VERSION_MAJOR,
};

/// First pause between attempts; it doubles up to the maximum.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// Shortest and longest time that a connect waits for its turn. The kernel takes none for no limit. A new attempt after the
/// longest finds the socket of a daemon that was started meanwhile.
const WAIT_MIN: Duration = Duration::from_millis(1);
const WAIT_MAX: Duration = Duration::from_millis(100);

/// How an attempt failed.
enum Failed {
    /// No process listens, or there is no socket.
    Absent(io::Error),
    /// The daemon is busy, or closed during the hello.
    Passing(io::Error),
    /// The daemon refused, but a later attempt may succeed.
    Refused(ClientError, Duration),
    /// No further attempt helps.
    Final(ClientError),
}

/// Connects and exchanges both hellos.
pub(crate) fn dial(options: &Options) -> Result<(Transport, ServerHello), ClientError> {
    options.check()?;
    let start = Instant::now();
    let deadline = start + options.connect_timeout;
    let absent_deadline = deadline.min(start + options.absent_timeout);
    let mut pause = PAUSE_MIN;
    let mut attempts = 0;
    loop {
        attempts += 1;
        let (give_up, wait, error) = match attempt(options, deadline) {
            Ok(connected) => return Ok(connected),
            Err(Failed::Final(error)) => return Err(error),
            Err(Failed::Refused(error, wait)) => (deadline, pause.max(wait), Ok(error)),
            Err(Failed::Absent(error)) => (absent_deadline, pause, Err(error)),
            Err(Failed::Passing(error)) => (deadline, pause, Err(error)),
        };
        // A pause that the daemon asked for is kept whole; if it passes the deadline, connecting fails now. The
        // client's own pause is cut, so that the last attempt falls at the deadline.
        let left = give_up.saturating_duration_since(Instant::now());
        let asked = error.is_ok() && wait > left;
        if left.is_zero() || asked {
            return Err(error.unwrap_or_else(|error| ClientError::Unavailable {
                socket: options.socket.clone(),
                reason: error.to_string(),
                attempts,
                waited_ms: start.elapsed().as_millis().try_into().unwrap_or(u64::MAX),
            }));
        }
        std::thread::sleep(wait.min(left));
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

fn attempt(options: &Options, deadline: Instant) -> Result<(Transport, ServerHello), Failed> {
    let transport = Transport::new(connect(options, deadline)?);
    let mut hello = ClientHello::new(&options.client_name);
    if options.checksum {
        hello.features |= FEATURE_CHECKSUM;
    }
    if let Some(user) = options.acts_as {
        hello = hello.acting_as(user);
    }
    let hello_max_frame = hello.max_frame;
    let hello = hello.to_bytes().map_err(|error| Failed::Final(ProtocolError::from(error).into()))?;
    transport.write_all(&hello, &[], Some(deadline)).map_err(Failed::Passing)?;
    check_server(&transport, options)?;
    let mut answer = [0; SERVER_HELLO_BYTES];
    transport.read_exact(&mut answer, Some(deadline)).map_err(Failed::Passing)?;
    let answer =
        ServerHello::parse(&answer).map_err(|error| Failed::Final(ProtocolError::from(error).into()))?;
    accepted(&answer)?;
    // A daemon that does not know the feature would count everything for this program's user.
    if answer.acts_as() != options.acts_as {
        return Err(Failed::Final(ClientError::CannotAct));
    }
    check_limits(&answer, hello_max_frame)?;
    Ok((transport, answer))
}

/// Connects, and waits its turn where many connect. A connect that does not block fails as long as the daemon's queue is
/// full, and one user can keep it full.
fn connect(options: &Options, deadline: Instant) -> Result<Stream, Failed> {
    let left = deadline.saturating_duration_since(Instant::now()).clamp(WAIT_MIN, WAIT_MAX);
    let connect = || {
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(left))?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(&options.socket)?)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, None)?;
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Stream::from(socket))
    };
    connect().map_err(|error: Errno| match error {
        Errno::ACCESS | Errno::PERM => {
            Failed::Final(ClientError::PermissionDenied { socket: options.socket.clone() })
        }
        Errno::AGAIN | Errno::TIMEDOUT | Errno::INTR => Failed::Passing(error.into()),
        _ => Failed::Absent(error.into()),
    })
}

fn check_server(transport: &Transport, options: &Options) -> Result<(), Failed> {
    if options.trust == crate::ServerTrust::Anyone {
        return Ok(());
    }
    let uid = peer::uid(transport.stream().as_fd()).ok();
    if uid.is_some_and(|uid| options.trust.trusts(uid)) {
        return Ok(());
    }
    Err(Failed::Final(ClientError::UntrustedServer {
        socket: options.socket.clone(),
        uid,
        trusted: options.trust.clone(),
    }))
}

fn accepted(hello: &ServerHello) -> Result<(), Failed> {
    const UNSUPPORTED: u16 = ErrorCode::UnsupportedMajor as u16;
    let mismatch = |server_min, server_max| {
        Err(Failed::Final(ClientError::UnsupportedVersion { server_min, server_max }))
    };
    match hello.status {
        0 if hello.major == VERSION_MAJOR => Ok(()),
        // The server continues in its chosen version, whatever range it states.
        0 => mismatch(hello.major, hello.major),
        UNSUPPORTED => mismatch(hello.min_major, hello.max_major),
        code => {
            let refused = ClientError::Refused { code, retry_after_ms: hello.retry_after_ms };
            match ErrorClass::of(code) {
                Some(ErrorClass::Capacity) => {
                    Err(Failed::Refused(refused, Duration::from_millis(hello.retry_after_ms.into())))
                }
                _ => Err(Failed::Final(refused)),
            }
        }
    }
}

/// Refuses limits with which no request could be answered, and frames larger than this client takes.
fn check_limits(hello: &ServerHello, max_frame: u32) -> Result<(), Failed> {
    let limits = &hello.limits;
    let ranges = [
        ("max_frame", limits.max_frame, PAYLOAD_BYTES_MIN, max_frame),
        ("max_streams", limits.max_streams, 1, u32::MAX),
        ("initial_credit", limits.initial_credit, 1, u32::MAX),
    ];
    match ranges.into_iter().find(|(_, value, min, max)| !(min..=max).contains(&value)) {
        None => Ok(()),
        Some((field, value, min, max)) => {
            Err(Failed::Final(ProtocolError::HelloLimit { field, value, min, max }.into()))
        }
    }
}
