//! The client must stay small: at most 5 MB stripped. Also shows the time from its start to its first byte on the
//! socket.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::Done;
use crate::error::{Error, Result};
use crate::host;

/// Most bytes of the stripped client.
const STRIPPED_BYTES_MAX: u64 = 5_000_000;

/// Runs of the client; the median is shown.
const RUNS: usize = 21;

pub fn run() -> Result<Done> {
    let binary = host::target_dir().join("release/rocmforge-client");
    let dir = tempfile::tempdir().map_err(Error::io("temporary directory"))?;
    let stripped = dir.path().join("rocmforge-client");
    host::run(Command::new("strip").arg("-o").arg(&stripped).arg(&binary))?;
    let bytes = fs::metadata(&stripped).map_err(Error::at(&stripped))?.len();
    if bytes > STRIPPED_BYTES_MAX {
        return Err(Error::TooLarge { file: stripped, bytes, max: STRIPPED_BYTES_MAX });
    }
    let socket = dir.path().join("api.sock");
    let mut times = (0..RUNS).map(|_| first_byte(&stripped, &socket)).collect::<Result<Vec<_>>>()?;
    times.sort();
    let millis = |time: Duration| time.as_secs_f64() * 1e3;
    let (median, worst) = (millis(times[RUNS / 2]), millis(times[RUNS - 1]));
    println!("stripped client: {bytes} bytes of at most {STRIPPED_BYTES_MAX}");
    println!(
        "start to first byte sent: median {median:.2} ms, worst {worst:.2} ms of {RUNS} runs; the goal is 5 ms"
    );
    Ok(Done::note(format!("{:.2} MB, first byte after {median:.2} ms", bytes as f64 / 1e6)))
}

/// Time from just before the client starts to the first byte on our socket, which never answers.
fn first_byte(client: &std::path::Path, socket: &std::path::Path) -> Result<Duration> {
    let os = |what: &'static str| move |error: Errno| Error::io(what)(error.into());
    // The socket of the last run, if there was one.
    let _ = fs::remove_file(socket);
    let listener =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(os("socket"))?;
    let address = SocketAddrUnix::new(socket).map_err(os("socket address"))?;
    rustix::net::bind(&listener, &address).map_err(os("bind"))?;
    rustix::net::listen(&listener, 1).map_err(os("listen"))?;
    let started = Instant::now();
    let mut child = Command::new(client)
        .arg("--socket")
        .arg(socket)
        .arg("ping")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(Error::at(client))?;
    // A client that never connects would leave us in accept, because its end closes nothing here; so wait with a
    // limit.
    let came = wait_readable(&listener).and_then(|()| {
        let stream = rustix::net::accept(&listener).map_err(os("accept"))?;
        wait_readable(&stream)?;
        let mut byte = [0];
        rustix::io::read(&stream, &mut byte).map_err(os("read"))?;
        Ok(started.elapsed())
    });
    // The client may still wait for an answer; kill and reap it in any case.
    let _ = child.kill();
    let _ = child.wait();
    came
}

fn wait_readable(fd: impl std::os::fd::AsFd) -> Result<()> {
    let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd.as_fd(), rustix::event::PollFlags::IN)];
    let limit = rustix::event::Timespec { tv_sec: 5, tv_nsec: 0 };
    match rustix::event::poll(&mut fds, Some(&limit)) {
        Ok(0) => Err(Error::Unexpected { what: "the client", text: "it sent nothing within 5 s".into() }),
        Ok(_) => Ok(()),
        Err(error) => Err(Error::io("poll")(error.into())),
    }
}
