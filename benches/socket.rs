//! Overhead of requests, beside an echo of as many bytes over a Unix socket between two threads: the cost of the kernel
//! alone.
//!
//! `socket [--rounds N] [--count N] [--daemon PATH]`: 9 rounds of 5,000 each, on one connection. A round has echoes, pings
//! one at a time, pings that do not wait for each other, and requests for one token. `--daemon` names a
//! second daemon, which is measured beside this build's in each round.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rocmforge_client::wire::{
    Flags, GenerateRequest, Op, PAYLOAD_BYTES_MAX, PingRequest, Prompt, SamplingOptions, encode_frame,
};
use rocmforge_client::{Client, Connection, Options, Pending};
use rocmforge_test_support::forge::tiny_llama;

type Failure = Box<dyn std::error::Error>;

/// Pings that wait for their answers at once, with [`Connection::send`].
const IN_FLIGHT: usize = 32;

struct Daemon {
    child: Child,
    name: &'static str,
    client: Client,
    connection: Connection,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended already
        let _ = self.child.wait();
    }
}

impl Daemon {
    fn start(name: &'static str, program: &Path, dir: &Path) -> Result<Self, Failure> {
        let socket = dir.join(format!("{name}.sock"));
        let mut command = Command::new(program);
        command.arg("--socket").arg(&socket).arg("--models").arg(dir);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        let options = Options { socket, ..Options::default() };
        let client = Client::new(options.clone());
        let until = Instant::now() + Duration::from_secs(20);
        let connection = loop {
            match Connection::connect(&options) {
                Ok(connection) => break connection,
                Err(error) if Instant::now() >= until => {
                    let _ = child.kill();
                    return Err(error.into());
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        Ok(Self { child, name, client, connection })
    }

    /// Pings a second of which [`IN_FLIGHT`] wait at once.
    fn rate(&self, count: usize) -> Result<f64, Failure> {
        let begun = Instant::now();
        let send = || self.connection.send(&PingRequest { payload: vec![], ext: vec![] });
        let mut waiting: VecDeque<Pending<_>> = VecDeque::new();
        for _ in 0..count {
            // Half of them are sent at once: a client that has many requests sends them as they come.
            if waiting.len() >= IN_FLIGHT {
                for pending in waiting.drain(..IN_FLIGHT / 2) {
                    pending.wait()?;
                }
            }
            waiting.push_back(send()?);
        }
        waiting.into_iter().try_for_each(|pending| pending.wait().map(drop))?;
        Ok(count as f64 / begun.elapsed().as_secs_f64())
    }

    /// Microseconds of a request for one token, and those that it spent outside the engine.
    fn token(&self) -> Result<[f64; 2], Failure> {
        let begun = Instant::now();
        let sampling = SamplingOptions {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: Some(1),
            top_logprobs: 0,
        };
        let mut generation = self.connection.generate(&GenerateRequest {
            model: "tiny".into(),
            prompt: Prompt::Ids(vec![1, 2, 3]),
            max_tokens: 1,
            sampling,
            stop: vec![],
            ignore_eog: true,
            timeout_ms: 0,
            request_id: 0,
            ext: vec![],
        })?;
        while generation.next_item()?.is_some() {}
        let end = generation.end().ok_or("a generation without an end")?;
        let us = begun.elapsed().as_secs_f64() * 1e6;
        let of = &end.timings;
        let inside = of.queue_us + of.load_us + of.prefill_us + of.decode_us;
        Ok([us, us - inside as f64])
    }
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

struct Arguments {
    rounds: usize,
    count: usize,
    daemon: Option<PathBuf>,
}

fn arguments() -> Result<Arguments, Failure> {
    let mut all = Arguments { rounds: 9, count: 5000, daemon: None };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or("a value is missing");
        match argument.as_str() {
            "--rounds" => all.rounds = value()?.parse()?,
            "--count" => all.count = value()?.parse()?,
            "--daemon" => all.daemon = Some(value()?.into()),
            "--bench" => {} // passed by cargo
            other => return Err(format!("{other}: no such option").into()),
        }
    }
    Ok(all)
}

/// Microseconds of an echo: the median, and the hundredth slowest; then echoes a second.
fn of_echo(count: usize, near: &mut UnixStream, bytes: &mut [u8]) -> Result<Vec<f64>, Failure> {
    let echoes = times(count, || Ok(near.write_all(bytes).and_then(|()| near.read_exact(bytes))?))?;
    Ok(vec![at(&echoes, 0.5), at(&echoes, 0.99), echoes.len() as f64 * 1e6 / echoes.iter().sum::<f64>()])
}

/// The same of pings, one at a time; pings a second with many in flight; then the medians of [`Daemon::token`].
fn of_daemon(count: usize, daemon: &Daemon) -> Result<Vec<f64>, Failure> {
    let pings = times(count, || Ok(daemon.client.ping(b"").map(drop)?))?;
    let in_turn = pings.len() as f64 * 1e6 / pings.iter().sum::<f64>();
    let rate = daemon.rate(4 * count)?;
    let tokens: Vec<[f64; 2]> = (0..count / 10).map(|_| daemon.token()).collect::<Result<_, _>>()?;
    let [all, outside] = [0, 1].map(|which| median(tokens.iter().map(|token| token[which]).collect()));
    Ok(vec![at(&pings, 0.5), at(&pings, 0.99), in_turn, rate, all, outside])
}

fn line(round: &str, name: &str, figures: &[f64]) {
    let figures: String = figures.iter().map(|figure| format!("{figure:12.1}")).collect();
    println!("{round:>5} {name:>8}{figures}");
}

fn main() -> Result<(), Failure> {
    let Arguments { rounds, count, daemon } = arguments()?;
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("tiny.gguf"), tiny_llama(1).filled().build().bytes)?;
    let mut daemons = vec![Daemon::start("daemon", Path::new(env!("CARGO_BIN_EXE_rocmforged")), dir.path())?];
    if let Some(other) = &daemon {
        daemons.push(Daemon::start("other", other, dir.path())?);
    }
    let ping = PingRequest { payload: vec![], ext: vec![] };
    let mut bytes = encode_frame(1, Op::Ping, Flags::NONE, PAYLOAD_BYTES_MAX, &ping)?;
    let mut near = echo(bytes.len())?;
    println!("round     who     p50 us      p99 us    a second   pipelined    token us  outside us");
    let mut all = vec![Vec::new(); 1 + daemons.len()];
    for round in 0..=rounds {
        let mut figures = vec![of_echo(count, &mut near, &mut bytes)?];
        for daemon in &daemons {
            figures.push(of_daemon(count, daemon)?);
        }
        if round == 0 {
            continue; // the warm-up round connects and wakes the runtime
        }
        let names = std::iter::once("echo").chain(daemons.iter().map(|daemon| daemon.name));
        for ((name, figures), all) in names.zip(figures).zip(&mut all) {
            line(&round.to_string(), name, &figures);
            all.push(figures);
        }
    }
    let columns = |all: &Vec<Vec<f64>>| -> Vec<f64> {
        let width = all.first().map_or(0, Vec::len);
        (0..width).map(|at| median(all.iter().map(|figures| figures[at]).collect())).collect()
    };
    let medians: Vec<Vec<f64>> = all.iter().map(columns).collect();
    line("all", "echo", &medians[0]);
    for (daemon, of_daemon) in daemons.iter().zip(&medians[1..]) {
        line("all", daemon.name, of_daemon);
        println!("{:>14} ping takes {:.2} echoes", daemon.name, of_daemon[0] / medians[0][0]);
    }
    Ok(())
}
