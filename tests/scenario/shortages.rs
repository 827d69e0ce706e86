//! Shortages of descriptors, memory and disk: the daemon stays up, reports the shortage, and recovers after it.
//! tests/README.md says which tests cover other failures.

use std::fs::File;
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use rocmforge_client::wire::ErrorCode;
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};

use crate::rig::{PATIENCE, Rig, TINY, answer, refusal, story};

/// CPU time of a process in clock ticks, summed over its threads.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // After the name, which may contain spaces: state is field 3, utime 14, stime 15.
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn without_descriptors_nothing_spins() {
    let mut rig = Rig::start_with_few_descriptors();
    let held = rig.take_all_descriptors();
    let (before, begun) = (cpu_ticks(rig.pid()), Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    // CPU time, not wall time: a busy machine gives less of it, never more.
    let (used, waited) = (cpu_ticks(rig.pid()) - before, begun.elapsed());
    let ticks = waited.as_millis() as u64 * rustix::param::clock_ticks_per_second() / 1000;
    assert!(used * 100 <= ticks * 5, "{used} of {ticks} ticks while no connection could be accepted");
    drop(held);
    rig.assert_serves();
}

#[test]
fn a_model_for_which_there_is_no_memory_can_be_had_later() {
    let mut rig = Rig::start();
    rig.assert_serves();
    // The kept model with 256 MiB after its last tensor, which the daemon does not read.
    std::fs::copy(rig.model(TINY), rig.model("large")).unwrap();
    File::options().write(true).open(rig.model("large")).unwrap().set_len(256 << 20).unwrap();
    let pid = Pid::from_raw(rig.pid() as i32).unwrap();
    let statm = std::fs::read_to_string(format!("/proc/{}/statm", rig.pid())).unwrap();
    let pages: u64 = statm.split_whitespace().next().unwrap().parse().unwrap();
    let now = pages * rustix::param::page_size() as u64;
    // Enough for some threads and their work, not for the mapping.
    let limit = |current| Rlimit { current, maximum: None };
    prlimit(Some(pid), Resource::As, limit(Some(now + (128 << 20)))).unwrap();
    let client = rig.client();
    let error = refusal(client.load("large"));
    assert_eq!((error.code, error.retryable), (ErrorCode::Busy as u16, true), "{error}");
    assert!(error.message.contains("short of file descriptors or memory"), "{error}");
    rig.assert_serves();
    prlimit(Some(pid), Resource::As, limit(None)).unwrap();
    assert!(client.load("large").unwrap().mapped_now);
    rig.assert_serves();
}

#[test]
fn a_full_disk_takes_the_log_and_nothing_else() {
    let mut rig = Rig::idle();
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let mut child = rig.command().stderr(full()).stdout(full()).spawn().unwrap();
    let client = rig.client();
    answer(&client, &story(8)).unwrap();
    client.load_file(&rig.model(TINY), Some("mine")).unwrap();
    let pid = Pid::from_child(&child);
    rustix::process::kill_process(pid, Signal::HUP).unwrap();
    assert_eq!(answer(&client, &story(8)).unwrap().text, ", there was a little girl");
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    // And with a writable log.
    rig.run();
    rig.assert_serves();
}

#[test]
fn ready_comes_with_ten_models_and_none_mapped() {
    let mut rig = Rig::idle();
    for number in 1..10 {
        std::fs::copy(rig.model(TINY), rig.model(&format!("{TINY}-{number}"))).unwrap();
    }
    let path = rig.dir.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let begun = Instant::now();
    let mut command = rig.command();
    command.env("NOTIFY_SOCKET", &path);
    rig.spawn(&mut command);
    let mut bytes = [0; 4096];
    let text = loop {
        let read = manager.recv(&mut bytes).unwrap();
        let text = String::from_utf8_lossy(&bytes[..read]).into_owned();
        if text.contains("READY=1") {
            break text;
        }
    };
    println!("READY=1 after {:.1} ms", begun.elapsed().as_secs_f64() * 1e3);
    assert!(text.contains("STATUS=serving 10 models"), "{text}");
    assert_eq!(rig.client().status().unwrap().models_mapped, 0);
    rig.assert_serves();
}
