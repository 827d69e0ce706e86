//! `cargo xtask soak`: runs many clients against a private daemon for a while, and checks that it leaks nothing.
//!
//! Sixteen threads generate, cancel, read slowly, load and unload. One in twenty answers goes to a client process
//! that is killed in the middle of it. Each complete answer is compared with the answer without other clients.
//! Meanwhile the daemon's memory, descriptors and threads are sampled; at the end no request may run, and no page may
//! be held.

mod clients;
mod judge;
mod pause;
pub(crate) mod process;

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use xtask::daemon::{self, Daemon};
use xtask::error::{Error, Result};
use xtask::host;

use clients::Shared;
use judge::{Sample, Verdict};
pub use pause::across_sessions;
use process::Process;

/// A configuration that other load on the machine cannot affect: one device, no budgets that depend on the machine.
const CONFIG: &str = "[device]\nbackend = 'cpu'\n[cpu]\nthreads = 2\n[kv]\nbudget_mib = 64\n";

/// Names under which one file is served.
const MODELS: [&str; 3] = ["first", "second", "third"];

/// Most time for the daemon to come to rest: threads for blocking work end after 10 s without work.
const REST_MAX: Duration = Duration::from_secs(40);

/// In less time than this, the work of a moment may look like growth. Beside other load the line through seven seconds rose
/// by 3.2 MiB once. It fell by as much in the next runs.
const SHORT: Duration = Duration::from_secs(60);

/// A short run in which the memory grew is repeated for so many times as long. The allowance stays the same.
const LONGER: u32 = 4;

#[derive(clap::Args)]
pub struct Args {
    /// Duration in minutes
    #[arg(long, default_value_t = 20.0, value_name = "N")]
    minutes: f64,
    /// Duration in hours
    #[arg(long, value_name = "N", conflicts_with = "minutes")]
    hours: Option<f64>,
    /// Number of parallel clients
    #[arg(long, default_value_t = 16, value_name = "N")]
    clients: u64,
    /// Seed of the random actions
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Instead, check that a GPU's weights stay while no client is connected for this many seconds
    #[arg(long, value_name = "SECONDS")]
    pause: Option<u64>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let binaries = daemon::build()?;
    if let Some(seconds) = args.pause {
        println!("{}", across_sessions(&binaries, Duration::from_secs(seconds))?);
        return Ok(());
    }
    let minutes = args.hours.map_or(args.minutes, |hours| hours * 60.0);
    println!("{}", soak(&binaries, Duration::from_secs_f64(minutes * 60.0), args.clients, args.seed)?);
    Ok(())
}

/// Soaks a daemon; returns a summary in words.
///
/// # Errors
/// [`Error::Soaked`] with all faults.
pub fn soak(binaries: &Path, time: Duration, clients: u64, seed: u64) -> Result<String> {
    let mut verdict = observe(binaries, time, clients, seed)?;
    println!("{verdict}");
    if time < SHORT && verdict.faults_but_growth().is_empty() && verdict.growth().is_some() {
        let longer = time * LONGER;
        println!("the memory grew: once more, for {} s, in which a leak grows on", longer.as_secs());
        verdict = observe(binaries, longer, clients, seed)?;
        println!("{verdict}");
    }
    let faults = verdict.faults();
    if faults.is_empty() {
        return Ok(format!("{} answers, nothing left behind", verdict.done.answers));
    }
    Err(Error::Soaked { seed, faults: faults.join("\n  ") })
}

/// Runs clients for so long; returns all observations of the daemon.
fn observe(binaries: &Path, time: Duration, clients: u64, seed: u64) -> Result<Verdict> {
    let models = tempfile::tempdir().map_err(Error::io("temporary directory"))?;
    let model = host::root().join("tests/models/tinystories-260k-f32.gguf");
    for name in MODELS {
        std::fs::copy(&model, models.path().join(format!("{name}.gguf"))).map_err(Error::at(&model))?;
    }
    let daemon = Daemon::start(binaries, models.path(), CONFIG)?;
    let process = Process::of(daemon.pid());
    let shared = Arc::new(Shared::new(&daemon)?);
    let before = rest(&process, None)?;
    let (begun, mut samples) = (Instant::now(), Vec::new());
    let threads: Vec<_> = (0..clients)
        .map(|number| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.run(seed.wrapping_mul(1_000_003).wrapping_add(number)))
        })
        .collect();
    let every = (time / 500).clamp(Duration::from_millis(200), Duration::from_secs(60));
    let interrupted = loop {
        thread::sleep(every.min(time.saturating_sub(begun.elapsed())));
        samples.push(process.sample(begun.elapsed())?);
        if let Err(stop) = host::check_interrupted() {
            break Some(stop);
        }
        if begun.elapsed() >= time {
            break None;
        }
    };
    shared.stop();
    for thread in threads {
        thread.join().map_err(|_| Error::Unexpected { what: "a client", text: "it panicked".into() })?;
    }
    if let Some(stop) = interrupted {
        return Err(stop);
    }
    shared.map_all()?;
    let after = rest(&process, Some(&before))?;
    let (left, done) = (shared.left()?, shared.done());
    daemon.stop()?;
    Ok(Verdict { before, after, samples, left, done })
}

/// Waits until threads for blocking work have ended and, given an earlier sample, until the daemon matches it or the
/// time is over.
fn rest(process: &Process, like: Option<&Sample>) -> Result<Sample> {
    let until = Instant::now() + REST_MAX;
    loop {
        let sample = process.sample(Duration::ZERO)?;
        let same = like.is_none_or(|like| (like.fds, like.threads) == (sample.fds, sample.threads));
        if (same && !process.has_blocking_threads()?) || Instant::now() >= until {
            return Ok(sample);
        }
        host::check_interrupted()?;
        thread::sleep(Duration::from_millis(100));
    }
}
