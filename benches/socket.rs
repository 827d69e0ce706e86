//! Overhead of a request: a ping to a daemon, beside an echo of as many bytes over a Unix socket between two threads.
//! The echo is the cost of the kernel alone.
//!
//! `socket [--rounds N] [--count N]`: 9 rounds of 5,000 each, alternating, on one connection.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rocmforge_client::wire::{Flags, Op, PAYLOAD_BYTES_MAX, PingRequest, encode_frame};
use rocmforge_client::{Client, Options};

type Failure = Box<dyn std::error::Error>;

struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have ended already
        let _ = self.0.wait();
    }
}

fn daemon(dir: &Path) -> Result<(Daemon, Client), Failure> {
    let socket = dir.join("api.sock");
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocmforged"));
    command.arg("--socket").arg(&socket).arg("--models").arg(dir);
    let child = Daemon(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
    let client = Client::new(Options { socket, ..Options::default() });
    let until = Instant::now() + Duration::from_secs(20);
    while let Err(error) = client.ping(b"") {
        if Instant::now() >= until {
            return Err(error.into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok((child, client))
}

/// One end of a socket pair; the other end echoes every `count` bytes until this end is closed.
fn echo(count: usize) -> Result<UnixStream, Failure> {
    let (near, mut far) = UnixStream::pair()?;
    std::thread::spawn(move || {
        let mut bytes = vec![0; count];
        while far.read_exact(&mut bytes).and_then(|()| far.write_all(&bytes)).is_ok() {}
    });
    Ok(near)
}

/// Microseconds of each of `count` calls, smallest first.
fn times(count: usize, mut call: impl FnMut() -> Result<(), Failure>) -> Result<Vec<f64>, Failure> {
    let mut all = Vec::with_capacity(count);
    for _ in 0..count {
        let begun = Instant::now();
        call()?;
        all.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    all.sort_by(f64::total_cmp);
    Ok(all)
}

fn at(sorted: &[f64], share: f64) -> f64 {
    let place = (sorted.len() as f64 * share) as usize;
    sorted.get(place.min(sorted.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    at(&values, 0.5)
}

fn main() -> Result<(), Failure> {
    let (mut rounds, mut count) = (9, 5000);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number =
            || -> Result<usize, Failure> { Ok(arguments.next().ok_or("a number is missing")?.parse()?) };
        match argument.as_str() {
            "--rounds" => rounds = number()?,
            "--count" => count = number()?,
            "--bench" => {} // passed by cargo
            other => return Err(format!("{other}: no such option").into()),
        }
    }
    let dir = tempfile::tempdir()?;
    let (_daemon, client) = daemon(dir.path())?;
    let ping = PingRequest { payload: vec![], ext: vec![] };
    let mut bytes = encode_frame(1, Op::Ping, Flags::NONE, PAYLOAD_BYTES_MAX, &ping)?;
    let mut near = echo(bytes.len())?;
    let mut of = [const { Vec::new() }; 6];
    println!(
        "{:>5} {:>30} {:>30} {:>7}",
        "round", "echo p50, p99 us; a second", "ping p50, p99 us; a second", "ratio"
    );
    for round in 0..=rounds {
        let echoes =
            times(count, || Ok(near.write_all(&bytes).and_then(|()| near.read_exact(&mut bytes))?))?;
        let pings = times(count, || Ok(client.ping(b"").map(drop)?))?;
        let rate = |times: &[f64]| times.len() as f64 * 1e6 / times.iter().sum::<f64>();
        let figures = [&echoes, &pings].map(|times| [at(times, 0.5), at(times, 0.99), rate(times)]);
        if round == 0 {
            continue; // the warm-up round connects and wakes the runtime
        }
        let [echo, ping] = figures;
        println!("{round:5} {} {} {:7.2}", row(echo), row(ping), ping[0] / echo[0]);
        of.iter_mut().zip(figures.as_flattened()).for_each(|(all, one)| all.push(*one));
    }
    let [e50, e99, erate, p50, p99, prate] = of.map(median);
    println!("{:>5} {} {} {:7.2}", "all", row([e50, e99, erate]), row([p50, p99, prate]), p50 / e50);
    Ok(())
}

fn row([p50, p99, rate]: [f64; 3]) -> String {
    format!("{p50:10.1} {p99:8.1} {rate:10.0}")
}
