//! A restart is a pause: the next process gets back what the service manager stored for the daemon.
//!
//! The manager here belongs to the test and follows systemd's protocol (sd_notify(3), sd_listen_fds(3)). It stores
//! descriptors by name, drops them on request, and passes all of them to the next process.

use std::fs::File;
use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use rocmforge_client::wire::{ErrorCode, GenerateRequest, SetRulesRequest};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::Signal;

use crate::common;
use crate::rig::{PATIENCE, Rig, TINY, answer, code, story};

type Stored = Arc<Mutex<Vec<(String, OwnedFd)>>>;

/// A service manager with a descriptor store.
struct Manager {
    rig: Rig,
    listener: UnixListener,
    stored: Stored,
    /// Maximum number of stored descriptors.
    places: Option<u32>,
}

impl Manager {
    fn new() -> Self {
        let rig = Rig::idle();
        let listener = UnixListener::bind(rig.socket()).unwrap();
        let socket = UnixDatagram::bind(rig.dir.path().join("notify")).unwrap();
        let stored = Stored::default();
        let store = Arc::clone(&stored);
        // The thread ends with the test's process.
        std::thread::spawn(move || while serve(&socket, &store).is_some() {});
        Self { rig, listener, stored, places: None }
    }

    /// Starts the daemon with the socket and all stored descriptors, as systemd does.
    fn start(&mut self) {
        let stored = self.stored.lock().unwrap();
        let pid = std::process::id();
        let mut command = Command::new("python3");
        let names: Vec<&str> = stored.iter().map(|(name, _)| name.as_str()).collect();
        let paths = stored.iter().map(|(_, fd)| format!("/proc/{pid}/fd/{}", fd.as_raw_fd()));
        let paths: Vec<String> = paths.collect();
        command.args(["-c", START, &names.join(":"), &paths.join(":")]);
        let daemon = self.rig.command();
        command.arg(daemon.get_program()).args(daemon.get_args());
        command.stdin(Stdio::from(OwnedFd::from(self.listener.try_clone().unwrap())));
        command.env("NOTIFY_SOCKET", self.rig.dir.path().join("notify")).env_remove("FDSTORE");
        command.env("MEMORY_PRESSURE_WATCH", "/dev/null");
        if let Some(places) = self.places {
            command.env("FDSTORE", places.to_string());
        }
        self.rig.spawn(&mut command);
        drop(stored);
        self.rig.client().ping(b"").expect("the daemon does not answer");
    }

    fn restart(&mut self, signal: Signal) {
        self.rig.signal(signal);
        self.rig.ended();
        self.start();
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.stored.lock().unwrap().iter().map(|(name, _)| name.clone()).collect();
        names.sort();
        names
    }

    /// Waits until the store has this many model files and states.
    #[track_caller]
    fn until(&self, models: usize, states: usize) {
        let until = std::time::Instant::now() + PATIENCE;
        let count = |prefix: &str| self.names().iter().filter(|name| name.starts_with(prefix)).count();
        while (count("model-"), count("state-")) != (models, states) {
            assert!(
                std::time::Instant::now() < until,
                "the store never had {models} models and {states} states: {:?}",
                self.names()
            );
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    /// The text of `status` about kept state.
    fn told(&self) -> String {
        let status = self.rig.client().status().unwrap();
        status
            .notes()
            .into_iter()
            .find(|(name, _)| *name == "kept")
            .map(|(_, text)| text.to_owned())
            .unwrap_or_default()
    }
}

/// Receives one message; `None` at the end.
fn serve(socket: &UnixDatagram, stored: &Stored) -> Option<()> {
    let mut bytes = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC).ok()?;
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let text = std::str::from_utf8(&bytes[..received.bytes]).unwrap();
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)).map(str::to_owned);
    let name = value("FDNAME=").unwrap_or_else(|| "stored".into());
    let mut stored = stored.lock().unwrap();
    if value("FDSTOREREMOVE=").is_some() {
        stored.retain(|(other, _)| *other != name);
    } else if value("FDSTORE=").is_some() {
        stored.extend(fds.into_iter().map(|fd| (name.clone(), fd)));
    }
    Some(())
}

/// Passes the socket, its standard input, and new descriptions of the files to a program, from descriptor 3 on.
const START: &str = "
import fcntl, os, sys
names, paths, program = sys.argv[1], sys.argv[2], sys.argv[3:]
fds = [0] + [os.open(path, os.O_RDONLY) for path in paths.split(':') if path]
fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds]
for number, fd in enumerate(fds):
    os.dup2(fd, 3 + number)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(fds)), LISTEN_FDNAMES=':'.join(filter(None, ['api', names])))
os.closerange(3 + len(fds), 200)
os.dup2(os.open('/dev/null', os.O_RDONLY), 0)
os.execv(program[0], program)
";

/// A request to the model `name`.
fn of(name: &str) -> GenerateRequest {
    GenerateRequest { model: name.into(), ..story(8) }
}

#[test]
fn passed_models_rules_and_locks_outlive_an_orderly_restart_and_a_kill() {
    let mut manager = Manager::new();
    manager.start();
    let client = manager.rig.client();
    let file = manager.rig.dir.path().join("mine.gguf");
    std::fs::copy(common::tinystories(), &file).unwrap();
    client.load_file(&file, Some("mine")).unwrap();
    manager.until(1, 1);
    // The file's name is not needed any more.
    std::fs::remove_file(&file).unwrap();
    let rules = SetRulesRequest {
        model: TINY.into(),
        pinned: Some(true),
        priority: Some(7),
        layers_min: Some(2),
        idle_s: Some(90),
        ext: vec![],
    };
    let set = client.set_rules(&rules).unwrap();
    assert!(set.host_pinned, "a pin by the daemon's own user did not lock: {}", set.host_reason);
    client.pin("mine").unwrap();
    let expected = answer(&client, &of("mine")).unwrap();
    assert_eq!(manager.told(), "1 of at most 510 passed files, rules of 2 models, 2 locked");

    for signal in [Signal::TERM, Signal::KILL, Signal::KILL] {
        manager.restart(signal);
        let client = manager.rig.client();
        assert_eq!(answer(&client, &of("mine")).unwrap(), expected, "after {signal:?}");
        manager.rig.eventually("the kept state is restored", |_| {
            manager.told() == "1 of at most 510 passed files, rules of 2 models, 2 locked"
        });
        let keep = |model: &str| SetRulesRequest {
            model: model.into(),
            pinned: None,
            priority: None,
            layers_min: None,
            idle_s: None,
            ext: vec![],
        };
        // The daemon serves before it has set all rules and locked all models again.
        let bytes = std::fs::metadata(common::tinystories()).unwrap().len();
        manager.rig.eventually("rules and locks are in force again", |status| {
            status.host.locked_bytes == 2 * bytes
                && client.set_rules(&keep(TINY)).unwrap().rules == set.rules
                && client.set_rules(&keep("mine")).unwrap().rules.pinned
        });
        manager.until(1, 1);
    }
    // An unload or unpin is permanent.
    let client = manager.rig.client();
    client.unload("mine").unwrap();
    client.unpin(TINY).unwrap();
    manager.until(0, 1);
    manager.restart(Signal::TERM);
    let client = manager.rig.client();
    assert_eq!(code(answer(&client, &of("mine"))), ErrorCode::ModelNotFound as u16);
    manager.rig.assert_serves();
    manager.rig.eventually("the other rules are restored", |_| {
        manager.told() == "0 of at most 510 passed files, rules of 1 models, 0 locked"
    });
}

#[test]
fn models_that_cannot_be_had_again_are_dropped_and_named() {
    let mut manager = Manager::new();
    manager.start();
    let client = manager.rig.client();
    let path = |name: &str| manager.rig.dir.path().join(format!("{name}.gguf"));
    for name in ["kept", "changed", "cut"] {
        std::fs::copy(common::tinystories(), path(name)).unwrap();
        client.load_file(&path(name), Some(name)).unwrap();
    }
    manager.until(3, 1);
    let (changed, cut) = (path("changed"), path("cut"));
    manager.rig.signal(Signal::KILL);
    manager.rig.ended();
    File::options().append(true).open(changed).unwrap().write_all(b"more").unwrap();
    File::options().write(true).open(cut).unwrap().set_len(100_000).unwrap();
    let copy = |fd: &OwnedFd| fd.as_fd().try_clone_to_owned().unwrap();
    {
        // The manager stores a later version's state, a duplicate, a file that no list names, an invalid list, and an
        // old list. A kill left the last.
        let mut stored = manager.stored.lock().unwrap();
        let some_file: OwnedFd = File::open(common::tinystories()).unwrap().into();
        let twin = stored
            .iter()
            .find(|(name, _)| name.starts_with("model-"))
            .map(|(name, fd)| (name.clone(), copy(fd)));
        stored.extend(twin);
        stored.push(("tensor-9".into(), copy(&some_file)));
        stored.push(("model-77".into(), copy(&some_file)));
        stored.push(("state-99".into(), copy(&some_file)));
        let state = stored.iter().find(|(name, _)| name.starts_with("state-")).map(|(_, fd)| copy(fd));
        stored.extend(state.map(|fd| ("state-0".to_owned(), fd)));
    }
    manager.start();
    let client = manager.rig.client();
    assert_eq!(answer(&client, &of("kept")).unwrap().text, ", there was a little girl");
    for name in ["changed", "cut"] {
        assert_eq!(code(answer(&client, &of(name))), ErrorCode::ModelNotFound as u16, "{name}");
    }
    manager.until(1, 1);
    let names = manager.names();
    assert!(
        names.iter().all(|name| !["tensor-9", "model-77", "state-99", "state-0"].contains(&name.as_str())),
        "{names:?}"
    );
    let log = manager.rig.log_text();
    for says in ["was lost at the restart: the file changed", "tensor-9", "state-99", "not sealed"] {
        assert!(log.contains(says), "the log lacks {says:?}:\n{log}");
    }
    manager.rig.assert_serves();
}

#[test]
fn the_number_of_stored_files_is_bounded_and_told() {
    let mut manager = Manager::new();
    manager.places = Some(4);
    manager.start();
    let client = manager.rig.client();
    for name in ["a", "b", "c"] {
        let path = manager.rig.dir.path().join(format!("{name}.gguf"));
        std::fs::copy(common::tinystories(), &path).unwrap();
        client.load_file(&path, None).unwrap();
    }
    manager.until(2, 1);
    assert_eq!(
        manager.told(),
        "2 of at most 2 passed files, rules of 0 models, 0 locked; no room for 1 more files"
    );
    client.unload("a").unwrap();
    manager.until(2, 1);
    assert_eq!(manager.told(), "2 of at most 2 passed files, rules of 0 models, 0 locked");
    manager.restart(Signal::TERM);
    let client = manager.rig.client();
    for name in ["b", "c"] {
        answer(&client, &of(name)).unwrap();
    }
}

/// The manager's descriptor would hold the file's memory after all names are gone.
#[test]
fn a_file_in_memory_without_a_name_is_kept_by_nobody() {
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else { return };
    let path = memory.path().join("mine.gguf");
    std::fs::copy(common::tinystories(), &path).unwrap();
    if rustix::fs::statfs(&path).unwrap().f_type as u64 != 0x0102_1994 {
        return; // no file system in memory
    }
    let mut manager = Manager::new();
    manager.start();
    let client = manager.rig.client();
    client.load_file(&path, None).unwrap();
    client.load_file(&common::tinystories(), Some("other")).unwrap();
    manager.until(2, 1);
    std::fs::remove_file(&path).unwrap();
    manager.until(1, 1);
    assert_eq!(code(answer(&client, &of("mine"))), ErrorCode::ModelNotFound as u16);
    answer(&client, &of("other")).unwrap();
}

#[test]
fn without_a_service_manager_nothing_is_kept_and_nothing_is_said() {
    let rig = Rig::start();
    let client = rig.client();
    client.load_file(&common::tinystories(), Some("mine")).unwrap();
    assert!(client.status().unwrap().notes().iter().all(|(name, _)| *name != "kept"));
}
