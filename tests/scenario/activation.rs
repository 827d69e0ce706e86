//! The service manager protocol: notifications of readiness, watchdog and end, and a socket that the manager passes.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::process::{Command, Stdio};

use rustix::process::Signal;

use crate::rig::{PATIENCE, Rig};

/// The service manager's end of `NOTIFY_SOCKET`.
struct Manager(UnixDatagram);

impl Manager {
    fn listen(rig: &Rig) -> Self {
        let socket = UnixDatagram::bind(rig.dir.path().join("notify")).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(socket)
    }

    /// Receives messages up to the first that contains `line`.
    #[track_caller]
    fn until(&self, line: &str) -> Vec<String> {
        let mut messages = Vec::new();
        let mut bytes = [0; 4096];
        loop {
            let len = match self.0.recv(&mut bytes) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                other => other.unwrap_or_else(|error| panic!("no message {line}: {error}; got {messages:?}")),
            };
            let text = String::from_utf8(bytes[..len].to_vec()).unwrap();
            let found = text.lines().any(|l| l.starts_with(line));
            messages.push(text);
            if found {
                return messages;
            }
        }
    }
}

#[test]
fn the_service_manager_is_told_of_readiness_life_reload_and_end() {
    let mut rig = Rig::idle();
    let manager = Manager::listen(&rig);
    let mut command = rig.command();
    command.env("NOTIFY_SOCKET", rig.dir.path().join("notify")).env("WATCHDOG_USEC", "6000000");
    rig.spawn(&mut command);
    let ready = manager.until("READY=1").pop().unwrap();
    assert!(ready.contains("STATUS=serving 1 models"), "{ready}");
    // Ready means that clients get answers without waiting.
    let options = rocmforge_client::Options { absent_timeout: std::time::Duration::ZERO, ..rig.options() };
    rocmforge_client::Client::new(options).ping(b"").unwrap();
    manager.until("WATCHDOG=1");
    manager.until("WATCHDOG=1"); // sent again only if all threads made progress

    rig.signal(Signal::HUP);
    let reloading = manager.until("RELOADING=1").pop().unwrap();
    assert!(reloading.contains("MONOTONIC_USEC="), "{reloading}");
    manager.until("READY=1");
    rig.assert_serves();

    rig.signal(Signal::TERM);
    manager.until("STOPPING=1");
    assert!(rig.ended().success());
}

#[test]
fn a_socket_from_systemd_is_served_and_stays() {
    let mut rig = Rig::idle();
    let listener = UnixListener::bind(rig.socket()).unwrap();
    // A client that connects before the daemon starts waits for it.
    let early = {
        let options = rig.options();
        std::thread::spawn(move || rocmforge_client::Client::new(options).ping(b"early"))
    };
    for _ in 0..2 {
        let models = rig.dir.path().join("models");
        let arguments = ["--socket", "/nonexistent/never-used.sock", "--models"].map(std::ffi::OsStr::new);
        rig.spawn(activated(&listener, &arguments).arg(models));
        rig.client().ping(b"").unwrap();
        rig.assert_serves();
        rig.signal(Signal::TERM);
        assert_eq!(rig.ended().code(), Some(0));
        assert!(rig.socket().exists(), "the daemon removed systemd's socket");
    }
    assert_eq!(early.join().unwrap().unwrap().payload, b"early");
}

/// The daemon as systemd starts it: with the socket as descriptor 3.
fn activated(listener: &UnixListener, arguments: &[&std::ffi::OsStr]) -> Command {
    let fd = OwnedFd::from(listener.try_clone().unwrap());
    // systemd sets LISTEN_PID to the daemon's pid; this shell does the same.
    let script = "exec 3<&0 0</dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$@\"";
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_rocmforged")]).args(arguments);
    command.stdin(Stdio::from(fd)).env_remove("NOTIFY_SOCKET");
    command
}

#[test]
fn clients_are_told_of_a_wrong_configuration_and_nobody_else_waits_for_them() {
    let mut rig = Rig::idle();
    let manager = Manager::listen(&rig);
    let listener = UnixListener::bind(rig.socket()).unwrap();
    let file = rig.dir.path().join("typo.toml");
    std::fs::write(&file, "[limits]\nstep_rowz = 32\n").unwrap();
    let arguments = ["--config".as_ref(), file.as_os_str()];

    // Nobody waits: an administrator's start fails at once.
    let started = std::time::Instant::now();
    let output = activated(&listener, &arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(78), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(started.elapsed() < std::time::Duration::from_secs(10), "{:?}", started.elapsed());

    // One client is the reason of the start, and others come while it lasts.
    let ask = |rig: &Rig| {
        // One that asked again would outlast the daemon, and then not say why.
        let options = rocmforge_client::Options { retry_timeout: 20 * PATIENCE, ..rig.options() };
        std::thread::spawn(move || rocmforge_client::Client::new(options).ping(b""))
    };
    let mut asking = vec![ask(&rig)];
    // In the socket's queue.
    while !poll_readable(&listener) {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let mut command = activated(&listener, &arguments);
    rig.spawn(command.env("NOTIFY_SOCKET", rig.dir.path().join("notify")));
    manager.until("STATUS=rocmforged cannot start");
    asking.extend((0..20).map(|_| ask(&rig)));
    for client in asking {
        let error = client.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("step_rowz") && error.contains("typo.toml"), "{error}");
        assert!(error.contains("restart rocmforged"), "{error}");
    }
    rig.signal(Signal::TERM);
    rig.ended();
    assert!(!poll_readable(&listener), "a client is left that would start the daemon again");
}

fn poll_readable(listener: &UnixListener) -> bool {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}

#[test]
fn a_descriptor_handed_over_has_to_be_a_listening_socket() {
    let rig = Rig::idle();
    let script = "exec 3</dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$@\"";
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_rocmforged")]).arg("--socket").arg(rig.socket());
    let output = command.output().unwrap();
    let says = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(69), "{says}");
    assert!(says.contains("handed over by systemd"), "{says}");
}
